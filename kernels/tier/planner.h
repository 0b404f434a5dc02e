// Gives each distinct expert of a step its lane. Deterministic: same tables, same costs, same picks -> same plan.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tier/cost_model.h"
#include "tier/heat.h"
#include "tier/slot_table.h"
#include "tier/step.h"

namespace glm53 {

struct PlannerOptions {
  uint32_t admit_after = 2;      // a record is admitted at its k-th touch
  uint32_t max_admissions = 8;   // per layer step: a burst of new experts must not stall it on copies
  float admit_margin = 1.1f;     // a newcomer must be this much hotter than the victim: no flapping between equals
  uint32_t min_cpu_experts = 0;  // when the CPU lane is up, at least so many misses of a decode step use it
  uint32_t min_cpu_every = 1;    // ... of every so manieth decode step of a layer, counted over all layers
  bool fuzz = false;             // tests: random legal lanes, admissions, evictions
  uint64_t seed = 0;
};

struct PlannerCounters {
  uint64_t admissions = 0, evictions = 0;
};

struct LaneLimits {
  bool cpu = false;        // the CPU lane may be used in this step
  uint32_t max_rows = 0;   // activation rows of one job
  uint32_t max_picks = 0;  // of one job
  uint32_t max_experts = 0;
};

class Planner {
 public:
  Planner(const PlannerOptions& options, uint32_t experts_per_layer, HeatTable& heat, SlotTable& slots, CostModel& costs);

  // Fills lanes, slots and copies of `plan`, whose entries and picks are grouped already.
  void place(const StepRequest& request, const LaneLimits& limits, uint64_t passes_done, StepPlan* plan);
  const PlannerCounters& counters() const { return counters_; }

 private:
  uint32_t id_of(const StepRequest& request, const PlanEntry& entry) const { return request.layer * experts_per_layer_ + entry.expert; }
  void place_by_cost(const StepRequest& request, const LaneLimits& limits, uint64_t passes_done, StepPlan* plan);
  void place_at_random(const StepRequest& request, const LaneLimits& limits, uint64_t passes_done, StepPlan* plan);
  void admit(const StepRequest& request, uint64_t passes_done, StepPlan* plan);
  bool land(PlanEntry* entry, uint32_t id, uint64_t pass, int32_t slot);
  uint32_t choose_num_cpu(const StepRequest& request, const LaneLimits& limits, const StepPlan& plan);
  double device_us(const StepRequest& request, const PlanEntry& entry) const;

  const PlannerOptions options_;
  const uint32_t experts_per_layer_;
  HeatTable& heat_;
  SlotTable& slots_;
  CostModel& costs_;
  PlannerCounters counters_;
  uint64_t decode_steps_ = 0;  // layer steps planned by cost with the CPU lane up
  std::mt19937_64 random_;
  std::vector<PlanEntry*> misses_;  // of the step, coldest first
};

}  // namespace glm53
