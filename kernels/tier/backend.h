// Who computes the picks of the CPU lane: this process, or cpu_expert over shared memory. Used by the controller thread alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tier/device.h"
#include "tier/lane_client.h"
#include "tier/planner.h"

namespace glm53 {

struct ColdResult {
  ColdReply reply;
  int64_t buffer = -1;  // to be released when the pass is over; -1: none
  double lane_us = 0;   // from submission to the sight of the result
  uint64_t record_bytes = 0;
};

class ExpertBackend {
 public:
  virtual ~ExpertBackend() = default;
  virtual const char* name() const = 0;
  // Looks at the peer; true while jobs may be submitted.
  virtual bool tick(uint64_t now_ns) = 0;
  // The same with a closer look, for moments when nobody waits.
  virtual bool watch(uint64_t now_ns) { return tick(now_ns); }
  virtual LaneLimits limits() const = 0;
  // Starts the plan's CPU entries. False: nothing was started.
  virtual bool submit(const StepRequest& request, const StepPlan& plan) = 0;
  // Waits for what submit started, never longer than the job deadline. False: abandoned, nothing of it may be read.
  virtual bool collect(ColdResult* result) = 0;
  virtual void release(int64_t buffer) = 0;
  // Times a few jobs on a lane that has just come up: calls saw(experts of layer 0 in the job, microseconds) for each. Stops at the first
  // failure.
  virtual void probe(const std::function<void(uint32_t, double)>& saw) = 0;
};

// The kernel on the calling thread, into memory of its own: the lane of a worker without cpu_expert, and what recomputes an abandoned job.
class InProcessBackend final : public ExpertBackend {
 public:
  InProcessBackend(const Arena& arena, uint32_t variant);
  ~InProcessBackend() override;
  const char* name() const override { return "in_process"; }
  bool tick(uint64_t) override { return true; }
  LaneLimits limits() const override { return {true, UINT32_MAX, UINT32_MAX, UINT32_MAX}; }
  bool submit(const StepRequest& request, const StepPlan& plan) override;
  bool collect(ColdResult* result) override;
  void release(int64_t) override {}
  void probe(const std::function<void(uint32_t, double)>&) override {}  // no round trip, and the kernel is measured already

 private:
  const Arena& arena_;
  MoePool* pool_ = nullptr;
  StepRequest request_;
  const StepPlan* plan_ = nullptr;
  uint64_t started_ns_ = 0;
  std::vector<float> rows_;
  std::vector<uint32_t> outs_;
  std::vector<MoeTask> tasks_;
};

class ShmBackend final : public ExpertBackend {
 public:
  ShmBackend(const Arena& arena, Region& region, uint64_t heartbeat_timeout_ns, uint64_t job_timeout_ns, int64_t spin_ns);
  const char* name() const override { return "shm"; }
  bool tick(uint64_t now_ns) override { return lane_.tick(now_ns); }
  bool watch(uint64_t now_ns) override;
  LaneLimits limits() const override { return {true, lane_.max_rows(), lane_.max_picks(), lane_.max_picks()}; }
  bool submit(const StepRequest& request, const StepPlan& plan) override;
  bool collect(ColdResult* result) override;
  void release(int64_t buffer) override { lane_.release(static_cast<uint32_t>(buffer)); }
  void probe(const std::function<void(uint32_t, double)>& saw) override;
  LaneClient& lane() { return lane_; }

 private:
  const Arena& arena_;
  LaneClient lane_;
  const int64_t spin_ns_;
  LaneJob job_;
  uint64_t seq_ = 0;
  uint64_t started_ns_ = 0;
  uint64_t record_bytes_ = 0;
};

}  // namespace glm53
