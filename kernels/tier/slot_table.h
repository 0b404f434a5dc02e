// Which record lies in which slot of the device, and when a slot may be rewritten.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tier/heat.h"

namespace glm53 {

class SlotTable {
 public:
  static constexpr int32_t kNone = -1;

  SlotTable(uint32_t num_slots, uint32_t num_records) : slots_(num_slots), slot_of_(num_records, kNone), free_(num_slots) {}

  // The slot that holds the whole record, or kNone.
  int32_t resident(uint32_t id) const {
    const int32_t slot = slot_of_[id];
    return slot != kNone && !slots_[static_cast<size_t>(slot)].landing ? slot : kNone;
  }
  bool landing(uint32_t id) const { return slot_of_[id] != kNone && slots_[static_cast<size_t>(slot_of_[id])].landing; }
  // A pass reads the slot.
  void read(int32_t slot, uint64_t pass) { slots_[static_cast<size_t>(slot)].last_pass = pass; }

  // True when every pass that read or wrote the slot is over.
  bool rewritable(int32_t slot, uint64_t passes_done) const {
    const Slot& s = slots_[static_cast<size_t>(slot)];
    return !s.landing && s.last_pass <= passes_done;
  }
  // The pool: slots in which a record lies for one step. find_free and find_victim leave them alone. An empty slot joins it; one of it
  // leaves it together with what lies in it.
  void reserve(int32_t slot);
  void release(int32_t slot);
  bool reserved(int32_t slot) const { return slots_[static_cast<size_t>(slot)].reserved; }
  const std::vector<int32_t>& pool() const { return pool_; }
  // An empty slot of the pool whose readers have passed, or kNone.
  int32_t find_reserved(uint64_t passes_done) const;
  // A slot without a record whose readers have passed, or kNone.
  int32_t find_free(uint64_t passes_done) const;
  // The rewritable resident slot with the lowest score, or kNone. A slot is rewritable when every pass that read it is over.
  int32_t find_victim(const HeatTable& heat, uint64_t passes_done) const;
  // The `most` lowest of these with their scores, lowest first: what find_victim would find one after the other.
  void find_victims(const HeatTable& heat, uint64_t passes_done, size_t most, std::vector<std::pair<float, int32_t>>* victims) const;
  // Pass `pass` copies record `id` into the slot. Until then, and until settle(), the record is not resident. Returns the evicted record or
  // kNone.
  int32_t begin_landing(int32_t slot, uint32_t id, uint64_t pass);
  // The two ends of a landing that no pass carries (begun with a pass that is never over): its last byte is there, or queued ahead of pass
  // `pass`, which may read it; or it is given up and the slot is empty.
  void land(int32_t slot, uint64_t pass);
  void abandon(int32_t slot, uint64_t pass);
  // Passes up to passes_done are over: what they copied is resident, except what `failed` (a pass that broke, or 0) was to copy.
  void settle(uint64_t passes_done, uint64_t failed);
  // Empties a resident slot (tests and shrinking). False while a pass still reads it.
  bool evict(int32_t slot, uint64_t passes_done);

  uint32_t size() const { return static_cast<uint32_t>(slots_.size()); }
  uint32_t used() const { return used_; }
  int32_t record_in(uint32_t slot) const { return slots_[slot].landing ? kNone : slots_[slot].id; }

 private:
  struct Slot {
    int32_t id = kNone;
    bool landing = false, reserved = false;
    uint64_t last_pass = 0;  // youngest pass that reads or writes it
  };
  void occupy(int32_t slot, uint32_t id);
  void clear(Slot& s);
  void forget_landing(int32_t slot);

  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_;  // record -> slot, also while landing
  std::vector<int32_t> landing_;  // slots
  std::vector<int32_t> pool_;     // slots
  uint32_t used_ = 0, free_;      // free_: empty and not of the pool
};

}  // namespace glm53
