// What the CPU lane costs, from jobs that were timed for that alone. Plain arithmetic: no clock, no thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device_costs.h"

namespace glm53 {

// So many experts of layer 0, each with so many rows.
struct ProbeJob {
  uint32_t experts, rows;
};

class LaneTimings {
 public:
  void add(ProbeJob job, double us);
  // The rates that the medians of each size give: a straight line through the jobs of one row, by their number of experts, and what more
  // rows cost from the others. Rows of which none was timed keep their ratio to one row in `before`. No job of one row: `before` itself.
  LaneRates rates(const LaneRates& before) const;

 private:
  struct Size {
    ProbeJob job;
    std::vector<double> us;
  };
  std::vector<Size> sizes_;
};

}  // namespace glm53
