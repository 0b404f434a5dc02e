// cpu_expert's side of the control region: a state machine that is advanced one protocol action at a time.
//
// The run loop and the tests use the same step(): a test can stop the server before any action and let the worker go on.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tier/page_table.h"
#include "tier/region.h"

namespace glm53 {

// The action that was done last. kIdle -> kClaimed -> kChecked -> kComputing* -> kComputed -> kFilled -> kPublished -> kPassed -> kIdle;
// from any state of an ended epoch -> kAcknowledged -> kIdle.
enum class ServerStep : uint32_t {
  kIdle = 0,
  kClaimed,
  kChecked,
  kComputing,
  kComputed,
  kFilled,
  kPublished,
  kPassed,
  kAcknowledged,
  kDrained,
  kQuit
};

struct ServerOptions {
  uint32_t variant = MOE_VARIANT_AUTO;
  uint32_t threads = 1;
  std::vector<int32_t> cpus;
  bool beat_thread = true;        // tests beat by hand
  uint32_t experts_per_step = 0;  // 0: a whole job in one action, which lets the pool spread it over its threads
  int64_t spin_ns = -1;           // polling after a job before sleeping; negative: as long as the pool's threads (moe_hot_ns)
  bool tune = false;              // time the kernel's variants on the arena's shape (only when the choice is automatic)
  bool huge_pages = false;        // ask for 2 MiB pages in the arena and count them, and enter all of it into the page table
};

struct ServerCounters {
  uint64_t jobs = 0, picks = 0, experts = 0, bytes = 0, dropped = 0, stale = 0, bad = 0, acks = 0;
};

class JobServer {
 public:
  // Attaches to both segments, takes the region's lease, and shows itself.
  JobServer(const std::string& ctl_path, const std::string& arena_path, const ServerOptions& options);
  // The same on segments that are mapped already (a thread of the worker's own process).
  JobServer(std::shared_ptr<Region> region, std::shared_ptr<Arena> arena, const ServerOptions& options);
  ~JobServer();

  // One action. False: there was nothing to do.
  bool step(uint64_t now_ns);
  ServerStep state() const { return state_; }
  // Steps until max_ns passed (kIdle or any), the worker quit (kQuit) or, once drain() was called, everything is served (kDrained).
  ServerStep run(int64_t max_ns);
  // Thread-safe: take no more work than what is published, then finish.
  void drain() { draining_.store(true, std::memory_order_release); }
  // From now on as if the process had been killed: no word is stored any more, only the lease goes back on destruction.
  void play_dead() { dead_ = true; }
  void beat(uint64_t now_ns) { abi_store(&words_.server_beat, now_ns); }

  Region& region() { return *region_; }
  const MoePool* pool() const { return pool_; }
  // Bytes of the arena in 2 MiB pages when it was attached; -1: not asked for, or the system does not tell (huge_note says why).
  int64_t huge_bytes() const { return huge_bytes_; }
  const std::string& huge_note() const { return huge_note_; }
  // Bytes of the records in this process's page table, from the front; 0 when huge_pages was not asked for.
  uint64_t mapped_bytes() const { return pages_ == nullptr ? 0 : pages_->filled(); }
  const ServerCounters& counters() const { return counters_; }

 private:
  JobServer(std::shared_ptr<Region> region, std::shared_ptr<Arena> arena, const std::string& arena_path, const ServerOptions& options);
  bool ended() const { return abi_load(&words_.abort_epoch) >= epoch_ || abi_load(&words_.epoch) != epoch_; }
  bool step_idle(uint64_t now_ns);
  void acknowledge(uint64_t now_ns);
  void claim(uint64_t now_ns);
  bool valid() const;
  bool generations_hold() const;
  void compute_some();
  void fill_done(uint64_t now_ns);
  void beat_loop();
  void ask_for_huge_pages();

  std::shared_ptr<Region> region_;
  std::shared_ptr<Arena> arena_;
  AbiCtlHeader& words_;
  const ServerOptions options_;
  MoePool* pool_ = nullptr;
  const int64_t spin_ns_;
  uint64_t awake_until_ns_ = 0;  // by polling: after a job the next one is near
  int64_t huge_bytes_ = -1;
  std::string huge_note_ = "not asked for";
  ServerStep state_ = ServerStep::kIdle;
  uint64_t next_seq_ = 1;
  uint64_t epoch_ = 0;

  // The claimed job: a private copy, so that a check and the use after it see the same values.
  AbiJob job_{};
  std::vector<AbiJobExpert> experts_;
  std::vector<uint32_t> rows_, outs_;
  std::vector<MoeTask> tasks_;
  uint32_t computed_ = 0;  // experts
  uint32_t status_ = ABI_STATUS_NONE;
  uint64_t claimed_ns_ = 0;

  ServerCounters counters_;
  bool dead_ = false;
  std::atomic<bool> draining_{false};
  std::atomic<bool> stop_beat_{false};
  std::atomic<uint64_t> progress_{0};
  std::atomic<uint64_t> computing_since_ns_{0};  // 0: not inside the kernel
  std::thread beat_thread_;
  std::unique_ptr<PageTableFill> pages_;  // ends before arena_
};

}  // namespace glm53
