#include "tier/cost_model.h"

#include <algorithm>
#include <utility>

namespace glm53 {
namespace {

constexpr double kForget = 0.98;     // about the last 50 jobs count
constexpr double kPriorWeight = 2;   // of each of the two prior points
constexpr double kRoundTripUs = 60;  // prior: two wake-ups, and a peer whose kernel is as fast as ours

}  // namespace

void OnlineLine::Sums::add(double at_x, double at_y, double times) {
  weight += times;
  x += times * at_x;
  y += times * at_y;
  xx += times * at_x * at_x;
  xy += times * at_x * at_y;
}

OnlineLine::OnlineLine(double a, double b, double scale, double outlier) : a_(a), b_(b), outlier_(outlier) {
  prior_.add(0, a, kPriorWeight);
  prior_.add(2 * scale, a + b * 2 * scale, kPriorWeight);
}

void OnlineLine::add(double x, double y) {
  const double bounded = std::min(y, outlier_ * (a_ + b_ * x));
  for (double* sum : {&seen_.weight, &seen_.x, &seen_.y, &seen_.xx, &seen_.xy}) *sum *= kForget;
  seen_.add(x, bounded, 1);
  const double weight = prior_.weight + seen_.weight;
  const double mean_x = (prior_.x + seen_.x) / weight;
  const double mean_y = (prior_.y + seen_.y) / weight;
  const double variance = (prior_.xx + seen_.xx) / weight - mean_x * mean_x;
  if (variance <= 0) return;
  b_ = std::max(0.0, ((prior_.xy + seen_.xy) / weight - mean_x * mean_y) / variance);
  a_ = std::max(0.0, mean_y - b_ * mean_x);
}

CostModel::CostModel(std::vector<std::array<double, 8>> kernel_us, double copy_us, const CostOverrides& overrides)
    : kernel_us_(std::move(kernel_us)), copy_us_(copy_us), overrides_(overrides), line_(kRoundTripUs, 1.0, kernel_us_[0][0]) {}

double CostModel::kernel_us(uint32_t layer, uint32_t rows) const {
  const auto& by_rows = kernel_us_[layer];
  const uint32_t whole = rows / 8;
  const uint32_t rest = rows % 8;
  return whole * by_rows[7] + (rest > 0 ? by_rows[rest - 1] : 0.0);
}

double CostModel::cpu_job_us(uint32_t experts, double kernel_sum_us) const {
  if (experts == 0) return 0;
  const double experts_us = overrides_.ct_b_us >= 0 ? overrides_.ct_b_us * experts : line_.b() * kernel_sum_us;
  return ct_a_us() + experts_us;
}

void CostModel::saw_hot(double kernel_sum_us, double us) {
  if (kernel_sum_us <= 0) return;
  // A step that was descheduled says nothing about the kernel.
  const double ratio = std::clamp(us / kernel_sum_us, 0.2, 5.0);
  hot_scale_ += 0.05 * (ratio - hot_scale_);
}

}  // namespace glm53
