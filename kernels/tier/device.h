// The machine that owns the slots and computes every lane but the CPU lane. The tier engine is written once over it, in the order that an
// asynchronous device needs: stage -> publish -> wait plan -> compute hot -> wait cold -> combine. On the CPU the same order is
// synchronous.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "tier/arena.h"
#include "tier/spin.h"
#include "tier/step.h"

namespace glm53 {

// What the controller tells the consumer about the CPU lane's picks of a pass.
struct ColdReply {
  const float* rows = nullptr;  // [num_cpu_picks][hidden], in the order of the plan's CPU entries
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const char* name() const = 0;
  // Planner default: how many misses of a decode step go to the CPU lane even where the cost model sees no gain.
  virtual uint32_t default_min_cpu_experts() const = 0;
  // ... and in every so manieth step of a layer.
  virtual uint32_t default_min_cpu_every() const = 0;

  // Makes the request's picks and activations readable by the host.
  virtual void stage(StepRequest* request) = 0;
  // Release-stores `pass` when everything before it in the device's order is done.
  virtual void signal(SeqWord* word, uint64_t pass) = 0;
  // Nothing after it in the device's order starts before the word reaches `pass`. Throws kTimeout at the deadline.
  virtual void wait(SeqWord* word, uint64_t pass, const char* what) = 0;
  virtual void copy_record(int32_t slot, const uint8_t* record, uint32_t bytes) = 0;
  // Evaluates every entry that is not the CPU lane's into the device's pick rows.
  virtual void compute(const StepRequest& request, const StepPlan& plan) = 0;
  // out[row] = sum over ascending router slots of weights * pick row, by fma from 0 (docs/arithmetic.md step 8).
  virtual void combine(const StepRequest& request, const StepPlan& plan, const ColdReply& cold, const float* weights, float* out) = 0;

  // Host view of a slot's bytes, for verify().
  virtual const uint8_t* slot_bytes(int32_t slot) = 0;
  // Microseconds of one expert of the layer with `rows` rows, from a slot or the arena: the planner's starting point.
  virtual double measure_kernel_us(uint32_t layer, uint32_t rows) = 0;
  virtual double measure_copy_us() = 0;
};

struct CpuDeviceOptions {
  uint32_t num_slots = 0;
  uint32_t variant = MOE_VARIANT_AUTO;
  uint32_t threads = 1;
  std::vector<int32_t> cpus;
  uint64_t wait_timeout_ns = 60'000'000'000;
  int64_t spin_ns = 30'000;
};

// Slots are private memory into which records are really copied; the kernels are kernels/cpu.
class CpuDevice final : public Device {
 public:
  CpuDevice(const Arena& arena, const CpuDeviceOptions& options);
  ~CpuDevice() override;

  const char* name() const override { return "cpu"; }
  uint32_t default_min_cpu_experts() const override { return 1; }
  // A prime, so that with any usual number of layers every layer has its turn. More often would only cost: on one machine's own cores the
  // other process gains nothing for experts this small.
  uint32_t default_min_cpu_every() const override { return 31; }
  void stage(StepRequest* request) override;
  void signal(SeqWord* word, uint64_t pass) override { word->post(pass); }
  void wait(SeqWord* word, uint64_t pass, const char* what) override;
  void copy_record(int32_t slot, const uint8_t* record, uint32_t bytes) override;
  void compute(const StepRequest& request, const StepPlan& plan) override;
  void combine(const StepRequest& request, const StepPlan& plan, const ColdReply& cold, const float* weights, float* out) override;
  const uint8_t* slot_bytes(int32_t slot) override;
  double measure_kernel_us(uint32_t layer, uint32_t rows) override;
  double measure_copy_us() override;

  const MoePool* pool() const { return pool_; }

 private:
  const Arena& arena_;
  const CpuDeviceOptions options_;
  MoePool* pool_ = nullptr;
  uint8_t* slots_ = nullptr;
  uint64_t slots_bytes_ = 0;
  std::vector<float> pick_rows_;      // [rows * top_k][hidden] of the pass
  std::vector<const float*> row_of_;  // pick -> its row; nullptr: masked
  std::vector<MoeTask> tasks_;
};

// out = sum_k fma(weights[k], rows[k], out), ascending k, from 0; a null row is skipped. Same bits with and without AVX2.
void combine_rows(float* out, const float* const* rows, const float* weights, uint32_t top_k, uint32_t hidden);

}  // namespace glm53
