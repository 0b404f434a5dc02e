// What travels between the engine thread and the controller for one layer step.
#pragma once

#include <cstdint>
#include <vector>

namespace glm53 {

// Where a pick is computed, or how its record is fetched. Values index the statistics.
enum class Lane : uint8_t { kHit = 0, kAdmit, kZeroCopy, kCpu, kStore };
constexpr uint32_t kNumLanes = 5;
const char* lane_name(Lane lane);

// Host-visible inputs of one MoE layer for one batch of rows. Pointers stay valid until the pass is over.
struct StepRequest {
  uint64_t pass = 0;  // 1, 2, 3, ...: one per request
  uint32_t layer = 0;
  uint32_t rows = 0;
  uint32_t top_k = 0;
  const float* x = nullptr;      // [rows][hidden]
  const int64_t* sel = nullptr;  // [rows][top_k]; experts_per_layer = masked pick, contributes nothing
  bool prefill = false;
};

// One distinct expert of the step. Its picks are [first, first + count) of pick_row / pick_out.
struct PlanEntry {
  uint32_t expert = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  Lane lane = Lane::kZeroCopy;
  int32_t slot = -1;  // kHit: computed from it; otherwise, with `copy`, the record is copied into it
  bool copy = false;  // kAdmit always; kCpu: promoted for later steps while another lane computes it now
};

struct StepPlan {
  std::vector<PlanEntry> entries;
  std::vector<uint32_t> pick_row;  // row of x
  std::vector<uint32_t> pick_out;  // number of the pick: row * top_k + router slot
  uint32_t num_cpu_picks = 0;      // the lane job's result rows are these, in the order of entries
  double hot_us = 0;               // predicted time of the device's own part

  void clear() {
    entries.clear();
    pick_row.clear();
    pick_out.clear();
    num_cpu_picks = 0;
    hot_us = 0;
  }
};

// Groups the picks by expert, experts ascending, rows ascending within an expert. Throws kInvalid for an index outside [0, num_experts].
void group_picks(const StepRequest& request, uint32_t num_experts, std::vector<uint32_t>* counts, StepPlan* plan);

}  // namespace glm53
