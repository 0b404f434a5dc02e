// The worker's side of the control region: publishes jobs, judges the server's life, aborts, quarantines.
//
// Single-threaded (the controller's) and free of clocks: the caller passes `now_ns`, so that tests drive it through any interleaving.
#pragma once

#include <cstdint>
#include <vector>

#include "tier/region.h"

namespace glm53 {

// Why the lane is off. Values are part of the statistics.
enum class DownReason : uint32_t {
  kNone = 0,
  kNeverAttached,
  kHeartbeatLost,
  kJobTimeout,
  kServerRestarted,
  kDrained,
  kAborted,
  kServerDied
};
const char* down_reason_name(DownReason reason);

// The picks of one layer step that one job carries. Expert i owns picks [first_pick, first_pick + num_picks) of rows / outs.
struct LaneJob {
  uint32_t layer = 0;
  uint32_t num_rows = 0;  // rows of x, all of which are copied into the buffer
  std::vector<AbiJobExpert> experts;
  std::vector<uint32_t> rows;  // [num_picks] row of x
  std::vector<uint32_t> outs;  // [num_picks] row of the result
};

struct LaneResult {
  const float* rows = nullptr;  // [max_picks][hidden]; valid until release(buffer)
  uint32_t buffer = 0;
  uint32_t status = ABI_STATUS_NONE;
  uint64_t claimed_ns = 0;
  uint64_t done_ns = 0;
};

struct LaneCounters {
  uint64_t submitted = 0, done = 0, refused = 0, full = 0, aborts = 0, ups = 0;
};

class LaneClient {
 public:
  LaneClient(Region& region, uint64_t heartbeat_timeout_ns, uint64_t job_timeout_ns);

  // Looks at the server's words and moves the lane up or down. Returns up().
  bool tick(uint64_t now_ns);
  // A system call more than tick(): a server that was killed is noticed by its lease, long before its heartbeat is missed.
  void check_lease(uint64_t now_ns);
  bool up() const { return up_; }
  DownReason reason() const { return reason_; }
  uint64_t since_ns() const { return since_ns_; }
  const LaneCounters& counters() const { return counters_; }

  // Publishes a job and returns its sequence number; 0 when the lane is down, the ring is full or no buffer is free.
  uint64_t submit(const LaneJob& job, const float* x, uint64_t now_ns);
  // The same for activations that somebody has written to x of this buffer already, as fp16: a device does. Nobody else may pick the
  // buffer: a client uses one way or the other. 0 also when the buffer is not free.
  uint64_t submit_in_place(const LaneJob& job, uint32_t buffer, uint64_t now_ns);
  enum class Poll { kPending, kDone, kFailed };
  // kDone: `result` may be read until release(). kFailed: nothing of the job may ever be read; compute its picks elsewhere.
  Poll poll(uint64_t seq, uint64_t now_ns, LaneResult* result);
  // The consumer's pass over the result is finished.
  void release(uint32_t buffer);
  // Abandons every open job and the epoch. The lane stays down until a server acknowledges the new epoch.
  void abort(DownReason reason, uint64_t now_ns);
  // Sleeps until the server rings or timeout_ns passed; `seen`: bell() from before the last look at the done entries.
  uint32_t bell() const { return abi_load_bell(&words_.done_bell); }
  void wait(uint32_t seen, int64_t timeout_ns) { sleep_on(words_.done_bell, seen, &words_.worker_asleep, timeout_ns); }

  uint32_t max_picks() const { return words_.max_picks; }
  uint32_t max_rows() const { return words_.max_rows; }
  uint64_t epoch() const { return epoch_; }
  uint32_t free_buffers() const;

 private:
  enum class Buffer : uint8_t { kFree, kBusy, kHeld, kQuarantined };
  struct Open {
    uint64_t seq;
    uint32_t buffer;
    uint64_t submitted_ns;
  };
  // kNone: the server is alive and in this epoch.
  DownReason judge(uint64_t now_ns) const;
  void close_job(uint64_t seq);
  // The next sequence number, or 0 when the lane is down or the ring is full.
  uint64_t next_seq();
  void publish(const LaneJob& job, uint64_t seq, uint32_t buffer, uint32_t x_dtype, uint64_t now_ns);

  Region& region_;
  AbiCtlHeader& words_;
  const uint64_t heartbeat_timeout_ns_;
  const uint64_t job_timeout_ns_;
  bool up_ = false;
  DownReason reason_ = DownReason::kNeverAttached;
  uint64_t since_ns_ = 0;
  uint64_t epoch_;
  uint64_t server_id_ = 0;
  std::vector<Buffer> buffers_;
  std::vector<Open> open_;
  LaneCounters counters_;
};

}  // namespace glm53
