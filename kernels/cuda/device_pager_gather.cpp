// DevicePager's part for the gather: a step's records in one launch. device_pager.h says how.
#include <algorithm>

#include "cuda/device_pager.h"

namespace glm53 {

void DevicePager::note_gathered(uint32_t expert, uint32_t slot, Counter counted) {
  if (driver_.gather != nullptr) gathered_.push_back({expert, slot, counted});
}

void DevicePager::launch_gather(uint32_t layer, uint64_t pass) {
  if (gather_.empty()) return;
  const auto count = static_cast<uint32_t>(gather_.size());
  for (uint32_t i = 0; i < spec_.link_derate; ++i) {
    if (!move(gather_.data(), count)) return read_in_place(layer, pass);
  }
  sent_ = true;
  counters_[kBytes] += count * spec_.record_stride;
}

void DevicePager::read_in_place(uint32_t layer, uint64_t pass) {
  for (const Gathered& g : gathered_) {
    if (g.slot < spec_.num_transit) {
      std::vector<uint32_t>& experts = in_transit_[layer];
      experts.erase(std::find(experts.begin(), experts.end(), g.expert));
    } else {
      // Free again when the step is over: a launch before the one that failed may still write it, and a later copy is sent behind that.
      slots_.abandon(static_cast<int32_t>(g.slot - spec_.num_transit), pass);
    }
    point_at_host(layer * spec_.experts_per_layer + g.expert);
    --counters_[g.counted];
    ++counters_[kInPlace];
    if (fast_ != nullptr) fast_->entries[fast_->entry_of[g.expert]].lane = Lane::kZeroCopy;
  }
  copies_ = 0;
}

}  // namespace glm53
