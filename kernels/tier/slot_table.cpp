#include "tier/slot_table.h"

#include <algorithm>
#include <limits>

namespace glm53 {

int32_t SlotTable::find_free(uint64_t passes_done) const {
  if (free_ == 0) return kNone;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& s = slots_[i];
    if (s.id == kNone && !s.reserved && s.last_pass <= passes_done) return static_cast<int32_t>(i);
  }
  return kNone;
}

int32_t SlotTable::find_reserved(uint64_t passes_done) const {
  for (const int32_t slot : pool_) {
    const Slot& s = slots_[static_cast<size_t>(slot)];
    if (s.id == kNone && s.last_pass <= passes_done) return slot;
  }
  return kNone;
}

void SlotTable::reserve(int32_t slot) {
  slots_[static_cast<size_t>(slot)].reserved = true;
  pool_.push_back(slot);
  --free_;
}

void SlotTable::release(int32_t slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  s.reserved = false;
  pool_.erase(std::find(pool_.begin(), pool_.end(), slot));
  free_ += s.id == kNone;
}

int32_t SlotTable::find_victim(const HeatTable& heat, uint64_t passes_done) const {
  int32_t victim = kNone;
  float lowest = std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& s = slots_[i];
    if (s.id == kNone || s.landing || s.reserved || s.last_pass > passes_done) continue;
    const float score = heat.score(static_cast<uint32_t>(s.id));
    if (score < lowest) {
      lowest = score;
      victim = static_cast<int32_t>(i);
    }
  }
  return victim;
}

void SlotTable::find_victims(const HeatTable& heat, uint64_t passes_done, size_t most,
                             std::vector<std::pair<float, int32_t>>* victims) const {
  victims->clear();
  if (most == 0) return;
  // A heap whose first is the hottest of the coldest: nearly every slot is done with at one comparison.
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& s = slots_[i];
    if (s.id == kNone || s.landing || s.reserved || s.last_pass > passes_done) continue;
    const std::pair<float, int32_t> one(heat.score(static_cast<uint32_t>(s.id)), static_cast<int32_t>(i));
    if (victims->size() == most) {
      if (one >= victims->front()) continue;
      std::pop_heap(victims->begin(), victims->end());
      victims->pop_back();
    }
    victims->push_back(one);
    std::push_heap(victims->begin(), victims->end());
  }
  std::sort_heap(victims->begin(), victims->end());
}

int32_t SlotTable::begin_landing(int32_t slot, uint32_t id, uint64_t pass) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  const int32_t evicted = s.id;
  if (evicted != kNone) clear(s);
  occupy(slot, id);
  s.landing = true;
  s.last_pass = pass;
  landing_.push_back(slot);
  return evicted;
}

void SlotTable::occupy(int32_t slot, uint32_t id) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  s.id = static_cast<int32_t>(id);
  slot_of_[id] = slot;
  ++used_;
  free_ -= !s.reserved;
}

void SlotTable::clear(Slot& s) {
  slot_of_[static_cast<size_t>(s.id)] = kNone;
  s.id = kNone;
  s.landing = false;
  --used_;
  free_ += !s.reserved;
}

void SlotTable::land(int32_t slot, uint64_t pass) {
  forget_landing(slot);
  Slot& s = slots_[static_cast<size_t>(slot)];
  s.landing = false;
  s.last_pass = pass;
}

void SlotTable::abandon(int32_t slot, uint64_t pass) {
  land(slot, pass);
  evict(slot, pass);
}

void SlotTable::forget_landing(int32_t slot) { landing_.erase(std::find(landing_.begin(), landing_.end(), slot)); }

void SlotTable::settle(uint64_t passes_done, uint64_t failed) {
  size_t kept = 0;
  for (const int32_t slot : landing_) {
    Slot& s = slots_[static_cast<size_t>(slot)];
    if (s.last_pass > passes_done) {
      landing_[kept++] = slot;
    } else if (s.last_pass == failed) {
      clear(s);
    } else {
      s.landing = false;
    }
  }
  landing_.resize(kept);
}

bool SlotTable::evict(int32_t slot, uint64_t passes_done) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  if (s.id == kNone || s.landing || s.last_pass > passes_done) return false;
  clear(s);
  return true;
}

}  // namespace glm53
