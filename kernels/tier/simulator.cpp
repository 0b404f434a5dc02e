#include "tier/simulator.h"

#include <algorithm>
#include <array>
#include <list>
#include <queue>
#include <unordered_map>

#include "tier/error.h"

namespace glm53 {
namespace {

class Replay {
 public:
  Replay(const Trace& trace, uint32_t warm_tokens) : trace_(trace), warm_tokens_(warm_tokens) {}

  // Calls step(token, layer, first pick) for every layer step in order.
  template <typename StepFunction>
  void run(const StepFunction& step) {
    for (uint32_t token = 0; token < trace_.tokens; ++token) {
      counted_ = token >= warm_tokens_;
      for (uint32_t layer = 0; layer < trace_.num_layers; ++layer) {
        step(layer, trace_.picks + (static_cast<size_t>(token) * trace_.num_layers + layer) * trace_.top_k);
      }
    }
  }
  // The same pick by pick: access(record) is true for a hit.
  template <typename AccessFunction>
  void run_picks(const AccessFunction& access) {
    run([&](uint32_t layer, const uint16_t* picks) {
      for (uint32_t k = 0; k < trace_.top_k; ++k) count(access(layer * trace_.experts_per_layer + picks[k]));
    });
  }
  void count(bool hit) {
    if (!counted_) return;
    ++outcome.picks;
    outcome.hits += hit;
  }
  void count_admission() { outcome.admissions += counted_; }

  CacheOutcome outcome;

 private:
  const Trace& trace_;
  const uint32_t warm_tokens_;
  bool counted_ = false;
};

CacheOutcome replay_heat(const Trace& trace, const TierOptions& options, uint32_t warm_tokens) {
  HeatTable heat(trace.num_layers, trace.experts_per_layer, options.heat);
  SlotTable slots(options.num_slots, trace.num_layers * trace.experts_per_layer);
  const std::array<double, 8> flat = {1, 1, 1, 1, 1, 1, 1, 1};
  CostModel costs(std::vector<std::array<double, 8>>(trace.num_layers, flat), 1, {});
  Planner planner(options.planner, trace.experts_per_layer, heat, slots, costs);
  Replay replay(trace, warm_tokens);
  std::vector<int64_t> sel(trace.top_k);
  std::vector<uint32_t> counts;
  StepRequest request;
  StepPlan plan;
  request.rows = 1;
  request.top_k = trace.top_k;
  request.sel = sel.data();
  replay.run([&](uint32_t layer, const uint16_t* picks) {
    std::copy(picks, picks + trace.top_k, sel.begin());
    ++request.pass;
    request.layer = layer;
    slots.settle(request.pass - 1, 0);
    group_picks(request, trace.experts_per_layer, &counts, &plan);
    planner.place(request, LaneLimits{}, request.pass - 1, &plan);
    for (const PlanEntry& entry : plan.entries) {
      replay.count(entry.lane == Lane::kHit);
      if (entry.copy) replay.count_admission();
    }
  });
  return replay.outcome;
}

CacheOutcome replay_clock(const Trace& trace, const TierOptions& options, uint32_t warm_tokens) {
  constexpr uint32_t kEmpty = UINT32_MAX;
  std::vector<uint32_t> record_in(options.num_slots, kEmpty);
  std::vector<uint8_t> referenced(options.num_slots, 0);
  std::unordered_map<uint32_t, uint32_t> slot_of;
  uint32_t hand = 0;
  Replay replay(trace, warm_tokens);
  replay.run_picks([&](uint32_t record) {
    const auto found = slot_of.find(record);
    if (found != slot_of.end()) {
      referenced[found->second] = 1;
      return true;
    }
    while (referenced[hand] != 0) {
      referenced[hand] = 0;
      hand = (hand + 1) % options.num_slots;
    }
    if (record_in[hand] != kEmpty) slot_of.erase(record_in[hand]);
    record_in[hand] = record;
    slot_of[record] = hand;
    hand = (hand + 1) % options.num_slots;
    replay.count_admission();
    return false;
  });
  return replay.outcome;
}

CacheOutcome replay_lru(const Trace& trace, const TierOptions& options, uint32_t warm_tokens) {
  std::list<uint32_t> order;  // most recent first
  std::unordered_map<uint32_t, std::list<uint32_t>::iterator> where;
  Replay replay(trace, warm_tokens);
  replay.run_picks([&](uint32_t record) {
    const auto found = where.find(record);
    if (found != where.end()) {
      order.splice(order.begin(), order, found->second);
      return true;
    }
    if (order.size() == options.num_slots) {
      where.erase(order.back());
      order.pop_back();
    }
    order.push_front(record);
    where[record] = order.begin();
    replay.count_admission();
    return false;
  });
  return replay.outcome;
}

CacheOutcome replay_belady(const Trace& trace, const TierOptions& options, uint32_t warm_tokens) {
  const uint64_t total = static_cast<uint64_t>(trace.tokens) * trace.num_layers * trace.top_k;
  const uint32_t num_records = trace.num_layers * trace.experts_per_layer;
  std::vector<uint64_t> next_use(total, UINT64_MAX);
  std::vector<uint64_t> seen(num_records, UINT64_MAX);
  for (uint64_t i = total; i-- > 0;) {
    const auto layer = static_cast<uint32_t>(i / trace.top_k % trace.num_layers);
    const uint32_t record = layer * trace.experts_per_layer + trace.picks[i];
    next_use[i] = seen[record];
    seen[record] = i;
  }
  std::vector<uint64_t> resident(num_records, 0);               // next use of a resident, 0: not resident
  std::priority_queue<std::pair<uint64_t, uint32_t>> furthest;  // stale entries are skipped
  uint32_t used = 0;
  uint64_t at = 0;
  Replay replay(trace, warm_tokens);
  replay.run_picks([&](uint32_t record) {
    const uint64_t next = next_use[at++];
    const bool hit = resident[record] != 0;
    if (!hit) {
      while (!furthest.empty() && resident[furthest.top().second] != furthest.top().first) furthest.pop();
      if (used == options.num_slots) {
        if (furthest.empty() || furthest.top().first <= next) return false;
        resident[furthest.top().second] = 0;
        furthest.pop();
      } else {
        ++used;
      }
      replay.count_admission();
    }
    resident[record] = next;
    furthest.emplace(next, record);
    return hit;
  });
  return replay.outcome;
}

}  // namespace

CacheOutcome simulate_cache(CachePolicy policy, const Trace& trace, const TierOptions& options, uint32_t warm_tokens) {
  if (options.num_slots == 0 || trace.top_k == 0 || trace.num_layers == 0) {
    throw Error(GLM53_INVALID, "a simulation needs at least one slot, one layer and one pick");
  }
  const uint64_t total = static_cast<uint64_t>(trace.tokens) * trace.num_layers * trace.top_k;
  for (uint64_t i = 0; i < total; ++i) {
    if (trace.picks[i] >= trace.experts_per_layer) {
      throw Error(GLM53_INVALID, format("pick %llu of the trace is expert %u of %u", static_cast<unsigned long long>(i), trace.picks[i],
                                        trace.experts_per_layer));
    }
  }
  switch (policy) {
    case CachePolicy::kHeat:
      return replay_heat(trace, options, warm_tokens);
    case CachePolicy::kClock:
      return replay_clock(trace, options, warm_tokens);
    case CachePolicy::kLru:
      return replay_lru(trace, options, warm_tokens);
    case CachePolicy::kBelady:
      return replay_belady(trace, options, warm_tokens);
  }
  throw Error(GLM53_INVALID, format("cache policy %u is not one of 0..3", static_cast<uint32_t>(policy)));
}

}  // namespace glm53
