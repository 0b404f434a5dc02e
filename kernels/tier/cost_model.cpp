#include "tier/cost_model.h"

#include <algorithm>
#include <utility>

namespace glm53 {
namespace {

constexpr double kForget = 0.98;  // about the last 50 jobs count
constexpr double kMinWeight = 8;  // points before a fit replaces the prior

}  // namespace

void OnlineLine::add(double x, double y) {
  weight_ = weight_ * kForget + 1;
  sum_x_ = sum_x_ * kForget + x;
  sum_y_ = sum_y_ * kForget + y;
  sum_xx_ = sum_xx_ * kForget + x * x;
  sum_xy_ = sum_xy_ * kForget + x * y;
  if (weight_ < kMinWeight) return;
  const double mean_x = sum_x_ / weight_;
  const double mean_y = sum_y_ / weight_;
  const double variance = sum_xx_ / weight_ - mean_x * mean_x;
  // When all jobs have one size the slope cannot be told from the intercept: keep the slope, move the intercept.
  if (variance > 0.01 * mean_x * mean_x) {
    b_ = std::clamp((sum_xy_ / weight_ - mean_x * mean_y) / variance, 0.05, 50.0);
  }
  a_ = std::max(0.0, mean_y - b_ * mean_x);
}

CostModel::CostModel(std::vector<std::array<double, 8>> kernel_us, double copy_us, const CostOverrides& overrides)
    : kernel_us_(std::move(kernel_us)), copy_us_(copy_us), overrides_(overrides) {}

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
