// The tier engine: one call per MoE layer and batch of rows, on the caller's thread, bit-identical for every placement.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "tier/controller.h"

namespace glm53 {

struct ForwardArgs {
  uint32_t layer;
  uint32_t rows;
  uint32_t top_k;
  const float* x;        // [rows][hidden]
  const int64_t* sel;    // [rows][top_k]
  const float* weights;  // [rows][top_k]
  bool prefill;
  float* out;  // [rows][hidden], written whole
};

struct VerifyReport {
  uint64_t records = 0, slots = 0;
  std::vector<uint64_t> bad_records;  // arena slots
  std::vector<uint32_t> bad_slots;    // device slots
};

class TierEngine {
 public:
  // region: may be null unless the backend is kShm in mode kFast. Arena and region outlive the engine.
  TierEngine(const Arena& arena, Region* region, const TierOptions& options);
  ~TierEngine();

  void forward(const ForwardArgs& args);
  bool lane_up() const { return controller_->lane_up(); }
  std::string stats_json();
  // Re-reads every record against its checksum and every slot against its record.
  VerifyReport verify();
  // Replaces a damaged record of this engine's arena, between two passes; a slot that holds a copy of it is emptied. data: the record's
  // bytes.
  void repair(Arena& arena, uint64_t record, const uint8_t* data);

 private:
  void run_block(const ForwardArgs& args);
  void keep_house();
  void save_heat();

  const Arena& arena_;
  Region* region_;
  const TierOptions options_;
  std::unique_ptr<CpuDevice> device_;
  std::unique_ptr<Controller> controller_;
  std::mutex forward_mutex_;
  uint64_t pass_ = 0;
  bool broken_ = false;  // a wait for the controller ran out: its step may still be in work, nothing can be trusted

  std::mutex house_mutex_;
  std::condition_variable house_wake_;
  bool closing_ = false;
  std::thread housekeeper_;
};

}  // namespace glm53
