#include "cuda/device_probe.h"

#include <algorithm>
#include <cstddef>

namespace glm53 {
namespace {

constexpr double kLeastUs = 1e-3;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// y = job_us + expert_us * x, neither negative.
struct Line {
  double sum_x = 0, sum_y = 0, sum_xx = 0, sum_xy = 0, count = 0;
  void add(double x, double y) {
    sum_x += x;
    sum_y += y;
    sum_xx += x * x;
    sum_xy += x * y;
    count += 1;
  }
  void solve(double* job_us, double* expert_us) const {
    const double spread = count * sum_xx - sum_x * sum_x;
    // Jobs of one size cannot tell the two apart.
    const double slope = spread > 0 ? (count * sum_xy - sum_x * sum_y) / spread : sum_y / sum_x;
    *expert_us = std::max(slope, kLeastUs);
    *job_us = (sum_y - *expert_us * sum_x) / count;
    if (*job_us >= 0) return;
    *job_us = 0;
    *expert_us = std::max(sum_xy / sum_xx, kLeastUs);
  }
};

}  // namespace

void LaneTimings::add(ProbeJob job, double us) {
  for (Size& size : sizes_) {
    if (size.job.experts == job.experts && size.job.rows == job.rows) return size.us.push_back(us);
  }
  sizes_.push_back({job, {us}});
}

LaneRates LaneTimings::rates(const LaneRates& before) const {
  Line line;
  for (const Size& size : sizes_) {
    if (size.job.rows == 1) line.add(size.job.experts, median(size.us));
  }
  if (line.count == 0) return before;
  LaneRates rates;
  double one = 0;
  line.solve(&rates.job_us, &one);
  const double scale = before.expert_us[0] > 0 ? one / before.expert_us[0] : 1;
  for (uint32_t i = 0; i < 8; ++i) rates.expert_us[i] = std::max(before.expert_us[i] * scale, one);
  // By rows, ascending; between two numbers of rows that were timed a straight line.
  std::vector<Size> by_rows;
  for (const Size& size : sizes_) {
    if (size.job.rows > 1 && size.job.rows <= 8) by_rows.push_back(size);
  }
  std::sort(by_rows.begin(), by_rows.end(), [](const Size& a, const Size& b) { return a.job.rows < b.job.rows; });
  uint32_t from = 1;
  double from_us = one;
  for (const Size& size : by_rows) {
    const double us = std::max((median(size.us) - rates.job_us) / size.job.experts, from_us);
    for (uint32_t rows = from; rows <= size.job.rows; ++rows) {
      const double share = size.job.rows == from ? 1 : static_cast<double>(rows - from) / (size.job.rows - from);
      rates.expert_us[rows - 1] = from_us + share * (us - from_us);
    }
    from = size.job.rows;
    from_us = us;
  }
  return rates;
}

}  // namespace glm53
