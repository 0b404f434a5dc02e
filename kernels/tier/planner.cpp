#include "tier/planner.h"

#include <algorithm>

namespace glm53 {

Planner::Planner(const PlannerOptions& options, uint32_t experts_per_layer, HeatTable& heat, SlotTable& slots, CostModel& costs)
    : options_(options), experts_per_layer_(experts_per_layer), heat_(heat), slots_(slots), costs_(costs), random_(options.seed) {}

void Planner::place(const StepRequest& request, const LaneLimits& limits, uint64_t passes_done, StepPlan* plan) {
  if (!request.prefill) heat_.advance(request.layer);
  misses_.clear();
  for (PlanEntry& entry : plan->entries) {
    const uint32_t id = id_of(request, entry);
    if (!request.prefill) heat_.touch(id);
    entry.slot = slots_.resident(id);
    if (entry.slot != SlotTable::kNone) {
      entry.lane = Lane::kHit;
      slots_.read(entry.slot, request.pass);
    } else {
      entry.lane = Lane::kZeroCopy;
      misses_.push_back(&entry);
    }
  }
  if (options_.fuzz) {
    place_at_random(request, limits, passes_done, plan);
  } else if (!request.prefill) {
    place_by_cost(request, limits, passes_done, plan);
  }
  plan->num_cpu_picks = 0;
  plan->hot_us = 0;
  for (const PlanEntry& entry : plan->entries) {
    if (entry.lane == Lane::kCpu) {
      plan->num_cpu_picks += entry.count;
    } else {
      plan->hot_us += costs_.kernel_us(request.layer, entry.count);
    }
  }
}

double Planner::device_us(const StepRequest& request, const PlanEntry& entry) const {
  switch (entry.lane) {
    case Lane::kHit:
      return costs_.hit_us(request.layer, entry.count);
    default:
      // A copy to a slot is not charged to this step: it pays for later ones.
      return costs_.zero_copy_us(request.layer, entry.count);
  }
}

void Planner::place_by_cost(const StepRequest& request, const LaneLimits& limits, uint64_t passes_done, StepPlan* plan) {
  std::stable_sort(misses_.begin(), misses_.end(), [&](const PlanEntry* a, const PlanEntry* b) {
    return heat_.score(id_of(request, *a)) < heat_.score(id_of(request, *b));
  });
  admit(request, passes_done, plan);
  const uint32_t num_cpu = limits.cpu ? choose_num_cpu(request, limits, *plan) : 0;
  for (uint32_t i = 0; i < num_cpu; ++i) misses_[i]->lane = Lane::kCpu;
  for (PlanEntry* entry : misses_) {
    if (entry->copy && entry->lane != Lane::kCpu) entry->lane = Lane::kAdmit;
  }
}

void Planner::admit(const StepRequest& request, uint64_t passes_done, StepPlan*) {
  uint32_t admitted = 0;
  for (auto it = misses_.rbegin(); it != misses_.rend() && admitted < options_.max_admissions; ++it) {
    const uint32_t id = id_of(request, **it);
    if (heat_.touches(id) < options_.admit_after || slots_.landing(id)) continue;
    int32_t slot = slots_.find_free(passes_done);
    if (slot == SlotTable::kNone) {
      slot = slots_.find_victim(heat_, passes_done);
      // Misses come hottest first: once one cannot displace the coldest resident, no later one can.
      if (slot == SlotTable::kNone) break;
      const auto victim = static_cast<uint32_t>(slots_.record_in(static_cast<uint32_t>(slot)));
      if (heat_.score(id) < options_.admit_margin * heat_.score(victim)) break;
    }
    land(*it, id, request.pass, slot);
    ++admitted;
  }
}

bool Planner::land(PlanEntry* entry, uint32_t id, uint64_t pass, int32_t slot) {
  if (slots_.begin_landing(slot, id, pass) != SlotTable::kNone) ++counters_.evictions;
  ++counters_.admissions;
  entry->slot = slot;
  entry->copy = true;
  return true;
}

uint32_t Planner::choose_num_cpu(const StepRequest& request, const LaneLimits& limits, const StepPlan& plan) {
  const uint32_t least = decode_steps_++ % options_.min_cpu_every == 0 ? options_.min_cpu_experts : 0;
  double device = 0;
  for (const PlanEntry& entry : plan.entries) device += device_us(request, entry);
  double best = device;
  uint32_t best_count = 0;
  uint32_t count = 0;
  uint32_t picks = 0;
  double kernel_sum = 0;
  for (const PlanEntry* entry : misses_) {
    picks += entry->count;
    if (count + 1 > limits.max_experts || picks > limits.max_picks) break;
    ++count;
    kernel_sum += costs_.kernel_us(request.layer, entry->count);
    device -= device_us(request, *entry);
    const double slowest = std::max(device, costs_.cpu_job_us(count, kernel_sum));
    if (slowest < best || count <= least) {
      best = slowest;
      best_count = count;
    }
  }
  return best_count;
}

void Planner::place_at_random(const StepRequest& request, const LaneLimits& limits, uint64_t passes_done, StepPlan* plan) {
  const auto chance = [this](uint32_t one_in) { return random_() % one_in == 0; };
  if (slots_.size() > 0 && chance(4) && slots_.evict(static_cast<int32_t>(random_() % slots_.size()), passes_done)) ++counters_.evictions;
  uint32_t experts = 0;
  uint32_t picks = 0;
  for (PlanEntry& entry : plan->entries) {
    const uint32_t id = id_of(request, entry);
    if (slots_.size() > 0 && entry.lane != Lane::kHit && !request.prefill && chance(2) && !slots_.landing(id)) {
      const auto start = random_() % slots_.size();
      for (uint32_t i = 0; i < slots_.size(); ++i) {
        const auto slot = static_cast<int32_t>((start + i) % slots_.size());
        if (slots_.rewritable(slot, passes_done)) {
          land(&entry, id, request.pass, slot);
          entry.lane = Lane::kAdmit;
          break;
        }
      }
    }
    const bool fits = limits.cpu && !request.prefill && experts < limits.max_experts && picks + entry.count <= limits.max_picks;
    if (fits && chance(3)) {
      // Any pick may go there, also one whose record lies in a slot or is being copied to one.
      entry.lane = Lane::kCpu;
      ++experts;
      picks += entry.count;
    }
  }
}

}  // namespace glm53
