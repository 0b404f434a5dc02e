// Bounded polling before sleeping, and a sequence word between two threads of one process.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "expert_region.h"

namespace glm53 {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// spin() is true while polling is still worth it, then false for good until reset().
class Spinner {
 public:
  explicit Spinner(int64_t budget_ns) : budget_ns_(budget_ns) {}
  void reset() { start_ns_ = 0; }
  bool spin() {
    // The clock costs more than a pause: look at it only now and then.
    for (int i = 0; i < 16; ++i) cpu_relax();
    const uint64_t now = abi_now_ns();
    if (start_ns_ == 0) start_ns_ = now;
    return static_cast<int64_t>(now - start_ns_) < budget_ns_;
  }

 private:
  const int64_t budget_ns_;
  uint64_t start_ns_ = 0;
};

// A number that one thread raises and one other thread waits for. post() is a release store, wait() acquires it.
class SeqWord {
 public:
  uint64_t value() const { return value_.load(std::memory_order_acquire); }
  void post(uint64_t value) {
    value_.store(value, std::memory_order_release);
    bell_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) != 0) abi_futex_wake(reinterpret_cast<uint32_t*>(&bell_));
  }
  // True once the value is >= `wanted`; false when the deadline passed first.
  bool wait(uint64_t wanted, uint64_t deadline_ns, int64_t spin_ns) {
    Spinner spinner(spin_ns);
    while (value() < wanted) {
      if (spinner.spin()) continue;
      const uint32_t seen = bell_.load(std::memory_order_seq_cst);
      asleep_.store(1, std::memory_order_seq_cst);
      if (value() < wanted) {
        const uint64_t now = abi_now_ns();
        if (now >= deadline_ns) {
          asleep_.store(0, std::memory_order_relaxed);
          return value() >= wanted;
        }
        abi_futex_wait(reinterpret_cast<const uint32_t*>(&bell_), seen, static_cast<int64_t>(deadline_ns - now));
      }
      asleep_.store(0, std::memory_order_relaxed);
    }
    return true;
  }
  // Makes a waiter look again without a new value (it sees its own stop flag).
  void nudge() {
    bell_.fetch_add(1, std::memory_order_seq_cst);
    abi_futex_wake(reinterpret_cast<uint32_t*>(&bell_));
  }

 private:
  alignas(64) std::atomic<uint64_t> value_{0};
  std::atomic<uint32_t> bell_{0};
  std::atomic<uint32_t> asleep_{0};
};

}  // namespace glm53
