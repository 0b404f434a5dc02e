// The CPU lane of a device's decode steps: jobs for cpu_expert whose activations the device wrote in place, and their rows for the device.
//
// A step's activations lie in the job buffer of its number, step % (buffers - 1); the last buffer belongs to jobs that are only timed. Why
// the device may write there without asking: the compute stream is one step at a time, and step n was let go only after its own job was
// over or abandoned. A server that still works on an abandoned job may read activations of another step; its rows are never read, because
// no job is open and none is published until it has acknowledged the new epoch (expert_abi.h). Rows are handed to the device where the
// server wrote them, one per pick at the pick's number; the buffer is held until the next step's request, which the device raises behind
// the sum.
//
// A job that is abandoned, refused or late is computed here, in the pager's thread, into memory that no server can reach: same bits.
//
// What the lane costs is timed twice. The probe comes before the first step that could use it, and that step waits for it. A lane that is
// up and gets few jobs teaches nothing any more, whatever it would cost by now: then a few small jobs a second are timed while steps go on,
// beside them, so that nothing waits.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "cuda/device_costs.h"
#include "cuda/device_probe.h"
#include "expert_pager.h"
#include "tier/lane_client.h"

namespace glm53 {

// For how long an answer is polled for: most jobs are shorter, and while one runs the device may be waiting.
constexpr int64_t kLaneSpinNs = 2'000'000;

// A distinct expert of a step; its picks (row * top_k + slot) are `count` of a list from `first` on.
struct LaneExpert {
  uint32_t expert, first, count;
};

class DeviceLane {
 public:
  // arena and region outlive it.
  DeviceLane(const PagerSpec& spec, const PagerFast& fast, const Arena& arena, Region& region);
  ~DeviceLane();

  // ---- any thread
  bool up() const { return up_.load(std::memory_order_acquire); }
  // Device address and buffer of a step's activations.
  uint64_t x_on_device(uint64_t number) const;

  // ---- the pager's thread
  // The device is done with the step before: its rows may go. True while jobs may be submitted.
  bool begin(uint64_t now_ns);
  // A closer look while nothing waits.
  void watch(uint64_t now_ns);
  bool needs_probe() const { return up() && !probed_; }
  // Times a few jobs. busy() is called before each: it may start copies, so that the lane is measured beside a busy link. False: it broke.
  bool probe(LaneRates* rates, const std::function<void()>& busy);
  // Goes on with timing small jobs, if it is time for that; call it when a step without a job was answered. Never waits. True at the end of
  // a series, with the rates that `rates` has become.
  bool sample(uint64_t now_ns, LaneRates* rates);
  // Starts a job on the activations of step `number`. False: nothing was started.
  bool submit(uint64_t number, uint32_t layer, uint32_t rows, const std::vector<LaneExpert>& experts, const std::vector<uint32_t>& picks);
  enum class Answer { kPending, kServed, kComputedHere };
  // Looks at the job; never blocks but to compute an abandoned job itself. Throws kInternal when the kernel refuses that.
  Answer poll(uint64_t now_ns);
  // After an answer: device address of the rows, float [picks][hidden], those of the job's picks valid.
  uint64_t rows_on_device() const { return rows_on_device_; }
  // After kServed: from publication to the sight of the rows, and of it what the server worked.
  double job_us() const { return job_us_; }
  double server_us() const { return server_us_; }
  // Waits a moment for the server to ring.
  void wait_for_bell();

  struct Counters {
    uint64_t recomputed_picks = 0, recomputed_steps = 0, bytes = 0;
    uint64_t samples = 0;  // series of timed jobs
  };
  struct Snapshot {
    bool up;
    DownReason reason;
    uint64_t since_ns;
    LaneCounters lane;
    Counters counters;
  };
  Snapshot snapshot() const;

 private:
  // Publishes a job that is only timed; its number, or 0.
  uint64_t submit_timed(ProbeJob job, uint64_t now_ns);
  // Microseconds until its rows are seen; negative: the lane broke.
  double time_job(ProbeJob job);
  uint32_t timed_experts() const;
  // Notes the answer to the series' open job. False: there is none yet.
  bool take_sample(uint64_t now_ns);
  void end_series(uint64_t now_ns, uint64_t pause_ns);
  void look(uint64_t now_ns);
  void compute_here();
  uint64_t on_device(const void* in_region) const;
  uint32_t buffer_of(uint64_t number) const { return static_cast<uint32_t>(number % (region_.words().num_buffers - 1)); }

  const Arena& arena_;
  Region& region_;
  LaneClient lane_;
  const uint32_t top_k_, max_rows_;
  const uint64_t region_on_device_;
  float* const own_rows_;
  const uint64_t own_rows_on_device_;
  MoePool* pool_ = nullptr;
  LaneJob job_;
  uint64_t seq_ = 0, submitted_ns_ = 0;
  uint32_t buffer_ = 0;
  uint32_t bell_ = 0;  // as of before the last poll
  int64_t held_ = -1;  // buffer that the device reads
  uint64_t rows_on_device_ = 0;
  double job_us_ = 0, server_us_ = 0;
  bool probed_ = false;
  uint32_t probe_record_ = 0;
  LaneTimings series_;
  uint32_t series_at_ = 0;                    // jobs of the series that were answered
  uint64_t sample_seq_ = 0, sampled_ns_ = 0;  // the open job of the series
  uint64_t next_series_ns_ = 0, series_pause_ns_;
  uint32_t recent_jobs_ = 0;  // of steps, since it was last asked whether a series is needed
  // A server that missed a job's deadline, or fell silent, is left alone for a while, each time for longer: every try with it costs a step
  // that deadline.
  DownReason slow_reason_ = DownReason::kNone;
  uint64_t slow_since_ns_ = 0, hold_until_ns_ = 0, hold_off_ns_;
  uint32_t served_ = 0;  // jobs since then
  std::atomic<bool> up_{false};
  Counters counters_;
};

}  // namespace glm53
