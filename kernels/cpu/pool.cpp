/* The pool of kernel threads: one queue of units over the whole call.
 *
 * A unit is a chunk of inputs to prepare, or a 128-wide band of gate and up together, or of down, of one expert for up to 8 rows. All
 * chunks come first, then all gate-and-up bands, then all down bands, and threads take them in this order. There is no barrier: a unit
 * waits for its own expert's counters only, and what it waits for was taken earlier, by a thread that is computing it or waits for
 * something taken earlier still. So the oldest unfinished unit never waits, whatever the system does to the threads. When there are few
 * bands for the threads, a band is cut at the group borders of the arithmetic as well.
 *
 * Publication: run() writes the units, then stores `ticket` = (call number << 32 | units left). A thread claims a unit by compare-and-swap
 * on that word, so a thread that wakes late, with an old call number in mind, can never claim a unit of a call it has not seen. A call ends
 * when as many units as it published are done; no thread needs to have woken for it.
 * Waiting: a thread watches `ticket` for `hot_ns` after its last unit, so that it is there when the next layer's call comes, and then
 * sleeps on the futex word `bell`, so that an idle pool costs no CPU time. run() wakes sleepers with one system call and under no lock:
 * the first one that wakes works while the others still wake. No wake-up is lost: a sleeper reads the bell, counts itself in `sleeping`,
 * looks at the ticket again and sleeps only while the bell is what it read; run() stores the ticket, moves the bell and then reads the
 * count, all sequentially consistent. So either run() sees the count and wakes it, or the bell has moved and it does not sleep.
 * The caller waits for the end of a call in the same way, on `done` itself: the thread that raises it to the total looks at
 * `caller_asleep`.
 */
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/error.h"
#include "cpu/expert.h"
#include "cpu/futex.h"
#include "cpu/numerics.h"
#include "cpu/variants.h"
#include "moe_host.h"

using namespace glm53;

namespace {

constexpr uint32_t kMaxThreads = 1024;
constexpr int kSpinsPerLook = 64;         /* pauses between two looks at the clock: 1 to 4 us */
constexpr int kUnitSpins = 200;           /* pauses before a unit that waits gives its CPU to whoever computes what it waits for */
constexpr uint32_t kWaveEvaluations = 64; /* bounds the memory of a call: longer ones are computed in waves */
/* With fewer units a thread than this, bands are split: at the end of a call threads wait for a unit's time, and splitting costs nothing
 * that could be measured. */
constexpr uint32_t kUnitsPerThread = 8;

enum class Stage : uint8_t { kPrepare, kInner, kOuter };

struct Unit {
  uint32_t evaluation;
  uint32_t index; /* chunk or band */
  Stage stage;
  uint8_t part;
};

/* A group of rows of a task. */
struct Rows {
  const MoeTask* task;
  uint32_t first, count;
};

uint32_t call_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
uint32_t units_left(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

/* How much a group of rows costs, in weights decoded for one row: decoding is most of it, each further row adds about two fifths. */
double cost_of(const Rows& rows) {
  const MoeExpertShape& shape = *rows.task->shape;
  return (is_gateless(shape) ? 2.0 : 3.0) * shape.hidden * shape.inter * (0.6 + 0.4 * rows.count);
}

/* Splits so that `units` become at least kUnitsPerThread a thread. */
uint32_t split_for(uint64_t units, size_t threads) {
  const uint64_t wanted = uint64_t{kUnitsPerThread} * threads;
  return units >= wanted ? 1u : 2 * units >= wanted ? 2u : kGroups;
}

}  // namespace

struct MoePool {
  explicit MoePool(Choice chosen, uint32_t num_threads) : choice(std::move(chosen)), scratch(num_threads) {
    for (auto& one : scratch) one = std::make_unique<ThreadScratch>();
  }

  ~MoePool() {
    stopping.store(true);
    bell.fetch_add(1);
    futex_wake(&bell, kMaxThreads);
    for (std::thread& thread : threads) thread.join();
  }

  void start(const int32_t* cpus, uint32_t num_cpus) {
    hot_ns = moe_hot_ns(static_cast<uint32_t>(scratch.size()), num_cpus);
    for (uint32_t i = 1; i < scratch.size(); ++i) {
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
    groups.clear();
    for (uint32_t i = 0; i < num_tasks; ++i) {
      if (check_task(tasks[i]) != 0) return -1;
      for (uint32_t row = 0; row < tasks[i].num_rows; row += MOE_MAX_ROWS) {
        const uint32_t left = tasks[i].num_rows - row;
        groups.push_back({&tasks[i], row, left < MOE_MAX_ROWS ? left : MOE_MAX_ROWS});
      }
    }
    for (size_t first = 0; first < groups.size(); first += kWaveEvaluations) {
      const size_t left = groups.size() - first;
      if (!run_wave(&groups[first], left < kWaveEvaluations ? left : kWaveEvaluations))
        return fail("out of memory for the scratch of a task");
    }
    return 0;
  }

  Choice choice;
  std::vector<std::unique_ptr<ThreadScratch>> scratch; /* [0] is the caller's */
  uint32_t forced_splits = 0;                          /* 0: by the number of units */
  double inline_cost = kInlineCost;
  std::atomic<int64_t> hot_ns{0};

 private:
  /* A job of this many weights takes about 15 us: waking threads and sharing the work costs more than it saves. */
  static constexpr double kInlineCost = 2e5;

  const KernelOps& ops_for(uint32_t rows) const { return *choice.ops[rows]; }

  bool run_wave(const Rows* rows, size_t count) {
    double cost = 0;
    for (size_t i = 0; i < count; ++i) cost += cost_of(rows[i]);
    if (!threads.empty() && cost >= inline_cost) return run_shared(rows, count);
    for (size_t i = 0; i < count; ++i) {
      if (!evaluate(ops_for(rows[i].count), memory, *scratch[0], *rows[i].task, rows[i].first, rows[i].count, nullptr)) return false;
    }
    return true;
  }

  bool run_shared(const Rows* rows, size_t count) {
    if (!place(rows, count)) return false;
    list_units(count);
    publish(static_cast<uint32_t>(units.size()));
    const uint32_t call = call_of(ticket.load(std::memory_order_relaxed));
    work(call, 0);
    wait_until_done(static_cast<uint32_t>(units.size()));
    return true;
  }

  bool place(const Rows* rows, size_t count) {
    uint64_t inner = 0, outer = 0;
    for (size_t i = 0; i < count; ++i) {
      inner += rows[i].task->shape->inter / kBlock;
      outer += rows[i].task->shape->hidden / kBlock;
    }
    Splits splits = {split_for(inner, scratch.size()), split_for(outer, scratch.size())};
    if (forced_splits != 0) splits = {forced_splits, forced_splits};
    size_t bytes = 0;
    for (size_t i = 0; i < count; ++i) bytes += Evaluation::bytes(*rows[i].task->shape, rows[i].count, splits);
    char* at = memory.reserve(bytes);
    if (at == nullptr) return false;
    for (size_t i = 0; i < count; ++i) {
      evaluations[i].place(ops_for(rows[i].count), *rows[i].task, rows[i].first, rows[i].count, splits, at, nullptr);
      at += Evaluation::bytes(*rows[i].task->shape, rows[i].count, splits);
    }
    return true;
  }

  void list_units(size_t count) {
    units.clear();
    const auto add = [this](size_t i, Stage stage, uint32_t index, uint32_t part) {
      units.push_back({static_cast<uint32_t>(i), index, stage, static_cast<uint8_t>(part)});
    };
    for (size_t i = 0; i < count; ++i) {
      for (uint32_t chunk = 0; chunk < evaluations[i].num_chunks(); ++chunk) add(i, Stage::kPrepare, chunk, 0);
    }
    for (size_t i = 0; i < count; ++i) {
      for (uint32_t band = 0; band < evaluations[i].inner_bands(); ++band) {
        for (uint32_t part = 0; part < evaluations[i].splits().inner; ++part) add(i, Stage::kInner, band, part);
      }
    }
    /* The first parts of all down bands come before any second part: they need the first inner bands alone, so a thread that lost its CPU
     * in one of the last inner bands keeps nobody waiting while there is something else to do. */
    for (uint32_t part = 0; part < kGroups; ++part) {
      for (size_t i = 0; i < count; ++i) {
        if (part >= evaluations[i].splits().outer) continue;
        for (uint32_t band = 0; band < evaluations[i].outer_bands(); ++band) add(i, Stage::kOuter, band, part);
      }
    }
  }

  void compute(const Unit& unit, uint32_t thread) {
    Evaluation& evaluation = evaluations[unit.evaluation];
    switch (unit.stage) {
      case Stage::kPrepare:
        return evaluation.prepare(unit.index);
      case Stage::kInner:
        wait_for([&evaluation] { return evaluation.prepared(); });
        return evaluation.inner(unit.index, unit.part, *scratch[thread]);
      case Stage::kOuter:
        wait_for([&] { return evaluation.outer_ready(unit.part); });
        return evaluation.outer(unit.index, unit.part, *scratch[thread]);
    }
  }

  /* What is awaited is being computed by another thread of the pool; when that one lost its CPU, it may get ours. */
  template <typename Ready>
  static void wait_for(Ready ready) {
    for (int i = 0; !ready(); ++i) {
      if (i < kUnitSpins) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

  void publish(uint32_t num_units) {
    done.store(0, std::memory_order_relaxed);
    const uint32_t call = call_of(ticket.load(std::memory_order_relaxed)) + 1;
    ticket.store(static_cast<uint64_t>(call) << 32 | num_units);
    bell.fetch_add(1);
    /* One thread more than there are units would find none: a call needs nobody in particular. */
    if (sleeping.load() != 0 && num_units > 1) futex_wake(&bell, num_units - 1);
  }

  /* Claims and computes units of one call until none is left. */
  void work(uint32_t call, uint32_t thread) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (call_of(seen) == call && units_left(seen) > 0) {
      if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      const uint32_t total = static_cast<uint32_t>(units.size()); /* stable: the call cannot end before this unit is done */
      compute(units[total - units_left(seen)], thread);
      if (done.fetch_add(1) + 1 == total && thread != 0 && caller_asleep.load()) futex_wake(&done, 1);
      seen = ticket.load(std::memory_order_acquire);
    }
  }

  /* Polls ready() until it is true or hot_ns have passed; returns what it was last. */
  template <typename Ready>
  bool poll(Ready ready) const {
    const int64_t start_ns = monotonic_ns(), limit_ns = hot_ns.load(std::memory_order_relaxed);
    do {
      for (int i = 0; i < kSpinsPerLook; ++i) {
        if (ready()) return true;
        _mm_pause();
      }
    } while (monotonic_ns() - start_ns < limit_ns);
    return ready();
  }

  void wait_until_done(uint32_t total) {
    if (poll([this, total] { return done.load(std::memory_order_acquire) == total; })) return;
    caller_asleep.store(true);
    for (uint32_t seen = done.load(); seen != total; seen = done.load()) futex_wait(&done, seen);
    caller_asleep.store(false, std::memory_order_relaxed);
  }

  void serve(uint32_t thread) {
    const FloatStateGuard guard;
    uint32_t last_call = 0;
    while (wait_for_call(&last_call)) work(last_call, thread);
  }

  /* False when the pool ends. */
  bool wait_for_call(uint32_t* last_call) {
    const auto is_new = [this, last_call] { return call_of(ticket.load()) != *last_call || stopping.load(); };
    if (!poll(is_new)) {
      sleeping.fetch_add(1);
      for (uint32_t seen = bell.load(); !is_new(); seen = bell.load()) futex_wait(&bell, seen);
      sleeping.fetch_sub(1);
    }
    *last_call = call_of(ticket.load());
    return !stopping.load();
  }

  std::vector<Rows> groups;
  std::vector<Unit> units;
  Evaluation evaluations[kWaveEvaluations];
  Memory memory; /* of the evaluations of a wave */
  std::vector<std::thread> threads;
  std::atomic<bool> stopping{false};
  std::atomic<bool> caller_asleep{false};
  std::atomic<uint32_t> sleeping{0};
  std::atomic<uint32_t> bell{0}; /* moved whenever there is something to see for a thread that sleeps */
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
  if (choice.ops[1] == nullptr) {
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

extern "C" int moe_pool_tune(MoePool* pool, const MoeExpertShape* shape) try {
  if (pool == nullptr || shape == nullptr) return fail("pool and shape must not be NULL");
  if (check_shape(*shape) != 0) return -1;
  const FloatStateGuard guard;
  tune_choice(pool->choice, *shape);
  return 0;
} catch (const std::bad_alloc&) {
  return fail("out of memory in moe_pool_tune");
}

extern "C" int moe_pool_force(MoePool* pool, uint32_t splits, double inline_cost) {
  if (pool == nullptr) return fail("pool must not be NULL");
  if (splits != 0 && splits != 1 && splits != 2 && splits != 4) return fail("splits = %u is not 0, 1, 2 or 4", splits);
  pool->forced_splits = splits;
  pool->inline_cost = inline_cost;
  return 0;
}

extern "C" void moe_pool_force_hot(MoePool* pool, int64_t hot_ns) { pool->hot_ns.store(hot_ns, std::memory_order_relaxed); }

extern "C" uint32_t moe_pool_variant(const MoePool* pool) { return pool->choice.variant; }
extern "C" const char* moe_pool_reason(const MoePool* pool) { return pool->choice.reason.c_str(); }
