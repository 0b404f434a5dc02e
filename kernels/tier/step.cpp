#include "tier/step.h"

#include "tier/error.h"

namespace glm53 {

const char* lane_name(Lane lane) {
  static const char* const kNames[kNumLanes] = {"hit", "admit", "zero_copy", "cpu", "store"};
  return kNames[static_cast<uint32_t>(lane)];
}

void group_picks(const StepRequest& request, uint32_t num_experts, std::vector<uint32_t>* counts, StepPlan* plan) {
  plan->clear();
  counts->assign(num_experts + 1, 0);
  const uint32_t num_picks = request.rows * request.top_k;
  for (uint32_t i = 0; i < num_picks; ++i) {
    const int64_t expert = request.sel[i];
    if (expert < 0 || expert > static_cast<int64_t>(num_experts)) {
      throw Error(GLM53_INVALID, format("sel[%u][%u] is %lld: experts are 0..%u (%u masks a pick)", i / request.top_k, i % request.top_k,
                                        static_cast<long long>(expert), num_experts - 1, num_experts));
    }
    ++(*counts)[static_cast<size_t>(expert)];
  }
  uint32_t first = 0;
  for (uint32_t e = 0; e < num_experts; ++e) {
    const uint32_t count = (*counts)[e];
    (*counts)[e] = first;  // from here on: where the expert's next pick goes
    if (count == 0) continue;
    PlanEntry entry;
    entry.expert = e;
    entry.first = first;
    entry.count = count;
    plan->entries.push_back(entry);
    first += count;
  }
  plan->pick_row.resize(first);
  plan->pick_out.resize(first);
  for (uint32_t i = 0; i < num_picks; ++i) {
    const auto expert = static_cast<size_t>(request.sel[i]);
    if (expert == num_experts) continue;
    const uint32_t at = (*counts)[expert]++;
    plan->pick_row[at] = i / request.top_k;
    plan->pick_out[at] = i;
  }
}

}  // namespace glm53
