/* The pool of kernel threads. A unit of work is one expert for up to 8 rows.
 *
 * Publication: run() writes the units, then stores `ticket` = (call number << 32 | units left). A thread claims a unit by compare-and-swap
 * on that word, so a thread that wakes late, with an old call number in mind, can never claim a unit of a call it has not seen. A call ends
 * when as many units as it published are done; no thread needs to have woken for it.
 * Waiting: a thread watches the word for a short while and then sleeps on a condition variable, so that an idle pool costs no CPU time.
 */
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/error.h"
#include "cpu/expert.h"
#include "cpu/numerics.h"
#include "cpu/variants.h"

using namespace glm53;

namespace {

constexpr uint32_t kMaxThreads = 1024;
constexpr int kSpins = 2000; /* about 20 to 50 us of pauses */

struct Unit {
  const MoeTask* task;
  uint32_t first_row;
  uint32_t rows;
};

uint32_t call_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
uint32_t units_left(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

}  // namespace

struct MoePool {
  explicit MoePool(Choice chosen, uint32_t num_threads) : choice(std::move(chosen)), workspaces(num_threads) {}

  ~MoePool() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping.store(true);
    }
    wake.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void start(const int32_t* cpus, uint32_t num_cpus) {
    for (uint32_t i = 1; i < workspaces.size(); ++i) {
      threads.emplace_back([this, i] { serve(i); });
      pthread_setname_np(threads.back().native_handle(), ("moe-" + std::to_string(i)).c_str());
      if (num_cpus == 0) continue;
      const int32_t cpu = cpus[(i - 1) % num_cpus];
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpu, &set);
      const int error = pthread_setaffinity_np(threads.back().native_handle(), sizeof set, &set);
      if (error != 0) throw std::system_error(error, std::generic_category(), "cpus: pinning a thread to CPU " + std::to_string(cpu));
    }
  }

  int run(const MoeTask* tasks, uint32_t num_tasks) {
    units.clear();
    for (uint32_t i = 0; i < num_tasks; ++i) {
      if (check_task(tasks[i]) != 0) return -1;
      if (tasks[i].num_rows == 0) continue;
      for (Workspace& workspace : workspaces) {
        if (!workspace.reserve(*tasks[i].shape)) return fail("out of memory for the scratch of a task");
      }
      for (uint32_t row = 0; row < tasks[i].num_rows; row += MOE_MAX_ROWS) {
        const uint32_t left = tasks[i].num_rows - row;
        units.push_back({&tasks[i], row, left < MOE_MAX_ROWS ? left : MOE_MAX_ROWS});
      }
    }
    if (units.size() > 0xFFFFFFFFu) return fail("too many rows in one call");
    if (threads.empty() || units.size() < 2) {
      for (const Unit& unit : units) compute(unit, 0);
      return 0;
    }
    publish(static_cast<uint32_t>(units.size()));
    const uint32_t call = call_of(ticket.load(std::memory_order_relaxed));
    work(call, 0);
    wait_until_done(static_cast<uint32_t>(units.size()));
    return 0;
  }

  Choice choice;
  std::vector<Workspace> workspaces; /* [0] is the caller's */

 private:
  void compute(const Unit& unit, uint32_t thread) {
    evaluate(*choice.ops, workspaces[thread], *unit.task, unit.first_row, unit.rows, nullptr);
  }

  void publish(uint32_t num_units) {
    done.store(0, std::memory_order_relaxed);
    const uint32_t call = call_of(ticket.load(std::memory_order_relaxed)) + 1;
    ticket.store(static_cast<uint64_t>(call) << 32 | num_units); /* seq_cst, against `sleeping`: see serve() */
    uint32_t to_wake = sleeping.load();
    if (to_wake == 0) return;
    if (to_wake > num_units - 1) to_wake = num_units - 1;
    const std::lock_guard<std::mutex> lock(mutex);
    for (uint32_t i = 0; i < to_wake; ++i) wake.notify_one();
  }

  /* Claims and computes units of one call until none is left. */
  void work(uint32_t call, uint32_t thread) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (call_of(seen) == call && units_left(seen) > 0) {
      if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      const uint32_t total = static_cast<uint32_t>(units.size()); /* stable: the call cannot end before this unit is done */
      compute(units[units_left(seen) - 1], thread);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == total && thread != 0) {
        const std::lock_guard<std::mutex> lock(mutex);
        finished.notify_one();
      }
      seen = ticket.load(std::memory_order_acquire);
    }
  }

  void wait_until_done(uint32_t total) {
    for (int i = 0; i < kSpins; ++i) {
      if (done.load(std::memory_order_acquire) == total) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this, total] { return done.load(std::memory_order_acquire) == total; });
  }

  void serve(uint32_t thread) {
    const FloatStateGuard guard;
    uint32_t last_call = 0;
    while (wait_for_call(&last_call)) work(last_call, thread);
  }

  /* False when the pool ends. */
  bool wait_for_call(uint32_t* last_call) {
    const auto is_new = [this, last_call] { return call_of(ticket.load()) != *last_call || stopping.load(); };
    for (int i = 0; i < kSpins && !is_new(); ++i) _mm_pause();
    if (!is_new()) {
      std::unique_lock<std::mutex> lock(mutex);
      /* Counted before the last look at the ticket; run() stores the ticket before it reads the count. One of the two sees the other. */
      sleeping.fetch_add(1);
      wake.wait(lock, is_new);
      sleeping.fetch_sub(1);
    }
    *last_call = call_of(ticket.load());
    return !stopping.load();
  }

  std::vector<Unit> units;
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable wake;     /* a call was published, or the pool ends */
  std::condition_variable finished; /* the last unit of a call was computed by another thread than the caller */
  std::atomic<bool> stopping{false};
  std::atomic<uint32_t> sleeping{0};
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<uint32_t> done{0};
};

extern "C" MoePool* moe_pool_create(uint32_t variant, uint32_t num_threads, const int32_t* cpus, uint32_t num_cpus) try {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    fail("num_threads = %u is not in 1..%u", num_threads, kMaxThreads);
    return nullptr;
  }
  if (cpus == nullptr) num_cpus = 0;
  for (uint32_t i = 0; i < num_cpus; ++i) {
    if (cpus[i] >= 0 && cpus[i] < CPU_SETSIZE) continue;
    fail("cpus: %d is not the number of a CPU", cpus[i]);
    return nullptr;
  }
  Choice choice = choose_variant(variant, host_features());
  if (choice.ops == nullptr) {
    fail("%s", choice.reason.c_str());
    return nullptr;
  }
  auto pool = std::make_unique<MoePool>(std::move(choice), num_threads);
  pool->start(cpus, num_cpus);
  return pool.release();
} catch (const std::exception& error) {
  fail("%s", error.what());
  return nullptr;
}

extern "C" void moe_pool_destroy(MoePool* pool) { delete pool; }

extern "C" int moe_pool_run(MoePool* pool, const MoeTask* tasks, uint32_t num_tasks) try {
  if (pool == nullptr) return fail("pool must not be NULL");
  if (tasks == nullptr && num_tasks > 0) return fail("tasks must not be NULL");
  const FloatStateGuard guard;
  return pool->run(tasks, num_tasks);
} catch (const std::bad_alloc&) {
  return fail("out of memory in moe_pool_run");
}

extern "C" uint32_t moe_pool_variant(const MoePool* pool) { return pool->choice.variant; }
extern "C" const char* moe_pool_reason(const MoePool* pool) { return pool->choice.reason.c_str(); }
