#include "tier/page_table.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; C libraries know it later
#endif

namespace glm53 {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kPiece = uint64_t{8} << 20;  // under a millisecond: as long as somebody who changes mappings waits for it
constexpr unsigned kMostThreads = 8;            // they share the page table's locks: more gain little
constexpr int kLowest = 19;                     // beside jobs they get what is left

void enter(const uint8_t* start, uint64_t length) {
  int rc;
  do {
    rc = madvise(const_cast<uint8_t*>(start), length, MADV_POPULATE_READ);
  } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
  // Any other failure is for the reader of the page to meet.
  if (rc == 0 || errno != EINVAL) return;
  const volatile uint8_t* at = start;  // a kernel before 5.14
  for (uint64_t i = 0; i < length; i += kPage) (void)at[i];
}

}  // namespace

PageTableFill::PageTableFill(const uint8_t* memory, uint64_t bytes, unsigned threads)
    : memory_(memory), bytes_(bytes), done_((bytes + kPiece - 1) / kPiece) {
  const unsigned count = std::min<uint64_t>(std::clamp(threads, 1u, kMostThreads), done_.size());
  try {
    for (unsigned i = 0; i < count; ++i) threads_.emplace_back([this] { fill(); });
  } catch (const std::system_error&) {
    // Fewer threads than wanted: those that there are do it. Without any, pages come when they are read.
  }
}

PageTableFill::~PageTableFill() {
  stop_.store(true);
  for (std::thread& thread : threads_) thread.join();
}

void PageTableFill::fill() {
  pthread_setname_np(pthread_self(), "page-table");
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kLowest);
  for (uint64_t piece = next_.fetch_add(1); piece < done_.size() && !stop_.load(); piece = next_.fetch_add(1)) {
    // The record memory begins at a page; a piece ends at one, but for the last.
    const uint8_t* start = memory_ + piece * kPiece;
    const uint64_t length = std::min(kPiece, bytes_ - piece * kPiece);
    enter(start, length);
    const std::lock_guard<std::mutex> lock(mutex_);
    done_[piece] = true;
    while (first_open_ < done_.size() && done_[first_open_]) ++first_open_;
    filled_.store(std::min(first_open_ * kPiece, bytes_), std::memory_order_release);
    moved_.notify_all();
  }
}

bool PageTableFill::wait_for(uint64_t bytes, std::chrono::milliseconds limit) {
  if (threads_.empty()) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  return moved_.wait_for(lock, limit, [&] { return filled() >= std::min(bytes, bytes_); });
}

}  // namespace glm53
