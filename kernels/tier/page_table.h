// Enters mapped shared memory into this process's page table before somebody has to wait for it.
//
// The pages are there, their creator has filled them; but each process has a page table of its own, and the first read of a record whose
// 4 KiB pages are not in it takes some 2,300 faults: about a millisecond, several times what the kernel needs for it. The table takes 8
// bytes for each 4 KiB, which is 230 MB for the 115 GB of GLM-5.3-Flash (it would grow to that anyway, record by record), and a thread
// fills it at 6 to 12 GB/s. With 2 MiB pages there is next to nothing to do.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace glm53 {

class PageTableFill {
 public:
  // Starts to fill, from the front, with up to `threads` threads of the lowest priority. The memory must stay mapped.
  PageTableFill(const uint8_t* memory, uint64_t bytes, unsigned threads);
  ~PageTableFill();  // leaves off where it is
  PageTableFill(const PageTableFill&) = delete;
  PageTableFill& operator=(const PageTableFill&) = delete;

  // Until at least the first `bytes` (or all there are) are entered. False at the limit, or when no thread could be had.
  bool wait_for(uint64_t bytes, std::chrono::milliseconds limit);
  // Bytes entered so far, counted from the front without gaps.
  uint64_t filled() const { return filled_.load(std::memory_order_acquire); }

 private:
  void fill();

  const uint8_t* const memory_;
  const uint64_t bytes_;
  std::atomic<uint64_t> next_{0};    // piece
  std::atomic<uint64_t> filled_{0};  // bytes
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable moved_;  // filled_
  std::vector<bool> done_;         // pieces
  uint64_t first_open_ = 0;        // piece
  std::vector<std::thread> threads_;
};

}  // namespace glm53
