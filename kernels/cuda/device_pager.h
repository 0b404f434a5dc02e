// Brings picked records into slots while the device waits: one transfer for every miss, by the copy engine, without the GIL.
//
// One layer step, in the order of the compute stream:
//   1. the picks are copied to pinned memory, the request word is raised;
//   2. the device waits until the reply word has reached the step's number;
//   3. the layer's kernels run.
// Between 1 and 2 the pager's thread sees the request, decides, and enqueues on the copy stream: records into slots, then the layer's table
// if it changed, then the reply. With nothing to copy it stores the reply itself.
//
// Why no event is needed: when a request is seen, every kernel before it in the compute stream is over, so any slot that this step does not
// read may be overwritten, and any table block that was copied before has been read. A record is in its slot for every kernel after the
// reply, and only those. A table is brought up to date at its own layer's turn, however many slots of its were taken meanwhile.
//
// Admission: a missing record takes a free slot, or the coldest record's if it is hotter; else one of the transit slots, for this step
// alone; else it is read in place. If a copy cannot be enqueued the record is read in place too, so that every request is answered.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "expert_pager.h"
#include "tier/heat.h"
#include "tier/slot_table.h"
#include "tier/spin.h"

namespace glm53 {

class DevicePager {
 public:
  explicit DevicePager(const PagerSpec& spec);
  ~DevicePager();
  DevicePager(const DevicePager&) = delete;
  DevicePager& operator=(const DevicePager&) = delete;

  void step(uint32_t layer, uint32_t rows, uint64_t selected, void* stream);
  void put(uint32_t record, uint32_t slot);
  void vacate(uint32_t first_slot, uint32_t count);
  void flush(void* stream);
  void where(int32_t* slot_of);
  void read_heat(float* slow, float* fast);
  void write_heat(const float* slow, const float* fast);
  void stats(uint64_t counters[8]);

 private:
  static constexpr uint32_t kRing = 1024;  // steps that the host may be ahead of the device
  static constexpr uint32_t kRequest = 0, kReply = 32;

  struct Step {
    uint32_t layer, rows;
  };
  struct Miss {
    uint32_t expert;
    float heat;
  };

  void run();
  // False when told to stop before the device got there.
  bool wait_for_request(uint64_t number);
  void answer(uint64_t number, const Step& step);
  void choose(const Step& step, uint64_t pass);
  void bring(uint32_t layer, const Miss& miss, uint64_t pass);
  bool copy(uint32_t record, uint32_t slot);
  void reply(uint64_t number);
  bool send_table(uint32_t layer, void* stream);
  void end_transit(uint32_t layer);
  void point(uint32_t layer, uint32_t expert, uint64_t address);
  void point_at_host(uint32_t record);
  uint64_t on_host(uint32_t record) const { return spec_.host_on_device + record * spec_.record_stride; }
  uint64_t in_slot(uint32_t slot) const { return spec_.slots + slot * spec_.record_stride; }
  int32_t find_place(uint32_t record, float heat, uint64_t pass);
  bool check(int code);

  PagerSpec spec_;
  const PagerDriver& driver_;
  std::vector<int64_t> offsets_;
  void* context_ = nullptr;
  std::array<Step, kRing> ring_{};
  uint64_t enqueued_ = 0;  // the stepping thread's
  SeqWord armed_;          // steps whose request is enqueued
  std::atomic<uint64_t> served_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};

  std::mutex mutex_;  // guards everything below
  HeatTable heat_;
  SlotTable slots_;                                // of the slots after the transit ones
  std::vector<bool> dirty_;                        // [layers]: the mirror is ahead of the table
  std::vector<std::vector<uint32_t>> in_transit_;  // [layers]: experts whose addresses are a transit slot
  std::vector<uint64_t> seen_;                     // [experts]: number of the step that picked it last
  std::vector<Miss> misses_;
  uint32_t transit_used_ = 0, copies_ = 0;
  bool sent_ = false;  // this step enqueued something on the copy stream
  uint64_t counters_[8] = {};

  std::thread thread_;
};

}  // namespace glm53
