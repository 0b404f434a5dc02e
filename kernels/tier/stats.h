// What the tier engine counts. Plain numbers, guarded by the controller's mutex; to_json() is what /stats and the metrics are made from.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tier/lane_client.h"
#include "tier/step.h"

namespace glm53 {

struct LaneSnapshot {
  bool enabled = false;  // false in mode `exact`
  bool up = false;
  DownReason reason = DownReason::kNone;
  uint64_t since_ns = 0;
  LaneCounters counters;
};

struct TierStats {
  explicit TierStats(uint32_t num_layers) : picks(num_layers) {}

  std::vector<std::array<uint64_t, kNumLanes>> picks;  // [layer][lane]
  std::array<uint64_t, kNumLanes> experts{};           // distinct experts per step, by lane
  uint64_t decode_steps = 0, prefill_steps = 0;        // layer steps
  uint64_t decode_picks = 0, decode_hits = 0, prefill_picks = 0, masked_picks = 0;
  uint64_t bytes_copied = 0;      // records into slots
  uint64_t bytes_in_place = 0;    // records read in the arena by the device
  uint64_t cpu_lane_bytes = 0;    // records evaluated by the CPU lane, whoever ran it
  uint64_t cpu_expert_bytes = 0;  // of these, by the cpu_expert process
  uint64_t recomputed_picks = 0;  // CPU picks that the worker computed after an abort or a refusal
  uint64_t recomputed_steps = 0;
  uint64_t lane_full = 0;  // steps whose CPU picks stayed on the device because ring or buffers were full
  uint64_t failed_passes = 0;
  uint64_t checksum_failures = 0;
  uint64_t heat_saves = 0, heat_errors = 0;
  double plan_us = 0, lane_us = 0, hot_us = 0, overrun_us = 0, combine_us = 0;  // sums
};

// Builds one flat-ish JSON object.
class JsonObject {
 public:
  JsonObject& add(const char* name, uint64_t value);
  JsonObject& add(const char* name, double value);
  JsonObject& add(const char* name, const std::string& value);  // escaped
  JsonObject& add_raw(const char* name, const std::string& json);
  std::string text() const { return "{" + body_ + "}"; }

 private:
  void key(const char* name);
  std::string body_;
};

std::string lane_counts_json(const std::array<uint64_t, kNumLanes>& counts);

}  // namespace glm53
