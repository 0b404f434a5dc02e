/* Sleeping on a word, for the threads of one process; and the clock. Linux. */
#ifndef GLM53_CPU_FUTEX_H_
#define GLM53_CPU_FUTEX_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace glm53 {

/* Returns when the word is not `seen` any more, when it is woken, or for no reason: the caller looks again. */
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

/* Wakes at most `count` threads that sleep on the word, with one system call. */
inline void futex_wake(std::atomic<uint32_t>* word, uint32_t count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

inline int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

}  // namespace glm53

#endif /* GLM53_CPU_FUTEX_H_ */
