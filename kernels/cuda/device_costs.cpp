#include "cuda/device_costs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace glm53 {
namespace {

constexpr double kStart = 0.92, kStay = 0.97;  // of the time without the lane: below it the lane is taken, or kept
constexpr double kRestGain = 0.1;              // about the last ten steps count
constexpr double kLinkFixedUs = 5;             // prior: what the first copy of a step costs beyond its bytes
constexpr double kUnknownJobUs = 60;
// A job that took so many times its prediction lost its CPUs for a while: it counts as just that many, and only jobs that keep coming late
// make the lane dear.
constexpr double kLateJob = 2;
constexpr double kLeastSlope = 0.5;  // of the probe, which saw experts at their quickest: jobs of one size must not make them free

}  // namespace

DeviceCosts::DeviceCosts(std::vector<double> layer_scale, double kernel_a_us, double kernel_b_us, double link_us,
                         const CostOverrides& overrides)
    : layer_scale_(std::move(layer_scale)),
      kernel_a_us_(kernel_a_us),
      kernel_b_us_(kernel_b_us),
      overrides_(overrides),
      line_(kUnknownJobUs, 1.0, 1.0, kLateJob),
      link_(kLinkFixedUs, link_us, 1.0) {}

void DeviceCosts::set_lane(const LaneRates& rates) {
  lane_ = rates;
  line_ = OnlineLine(rates.job_us, 1.0, std::max(rates.expert_us[0], 1e-3), kLateJob);
  lane_known_ = true;
  using_lane_ = false;
}

LaneRates DeviceCosts::lane() const {
  LaneRates now = lane_;
  now.job_us = line_.a();
  for (double& us : now.expert_us) us *= slope();
  return now;
}

void DeviceCosts::set_link(double record_us) { link_ = OnlineLine(kLinkFixedUs, record_us, 1.0); }

double DeviceCosts::expert_us(uint32_t rows) const {
  if (overrides_.ct_b_us >= 0) return overrides_.ct_b_us;
  const uint32_t whole = rows / 8, rest = rows % 8;
  return slope() * (whole * lane_.expert_us[7] + (rest > 0 ? lane_.expert_us[rest - 1] : 0.0));
}

double DeviceCosts::slope() const { return std::max(line_.b(), kLeastSlope); }

double DeviceCosts::nominal_us(uint32_t layer, const CostedMiss* misses, uint32_t count) const {
  double sum = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t whole = misses[i].rows / 8, rest = misses[i].rows % 8;
    sum += whole * lane_.expert_us[7] + (rest > 0 ? lane_.expert_us[rest - 1] : 0.0);
  }
  return sum * layer_scale_[layer];
}

double DeviceCosts::device_us(uint32_t computed, uint32_t copied, double ahead) const {
  double us = computed > 0 ? kernel_a_us_ + kernel_b_us_ * computed : 0;
  if (copied > 0) us += overrides_.ct_tzc_us >= 0 ? overrides_.ct_tzc_us * copied : link_.a() + link_.b() * copied;
  return us + link_us() * ahead;
}

double DeviceCosts::lane_us(uint32_t layer, const CostedMiss* misses, uint32_t count) const {
  if (count == 0) return 0;
  return job_us() + (overrides_.ct_b_us >= 0 ? overrides_.ct_b_us * count : slope() * nominal_us(layer, misses, count));
}

uint32_t DeviceCosts::choose(uint32_t layer, uint32_t hits, const std::vector<CostedMiss>& misses, uint32_t most, double ahead) {
  const uint32_t total = static_cast<uint32_t>(misses.size());
  if (!lane_known_ && lane_measured()) return 0;
  double best = device_us(hits + total, total, ahead) * (using_lane_ ? kStay : kStart);
  uint32_t chosen = 0;
  for (uint32_t count = 1; count <= std::min(total, most); ++count) {
    const uint32_t left = total - count;
    const double slowest = std::max(device_us(hits + left, left, ahead), lane_us(layer, misses.data(), count));
    if (slowest < best) {
      best = slowest;
      chosen = count;
    }
  }
  if (total > 0) using_lane_ = chosen > 0;
  return chosen;
}

void DeviceCosts::saw_job(uint32_t layer, const CostedMiss* misses, uint32_t count, double us) {
  line_.add(nominal_us(layer, misses, count), us);
}

void StepForecast::saw_request(uint32_t layer, uint32_t rows, uint64_t now_ns, double predicted_us) {
  Rest& rest = rest_[std::min<uint32_t>(rows, 8)];
  if (layer == 0) {
    first_ns_ = now_ns;
    foretold_us_ = rest_us_ = 0;
    following_ = true;
  } else if (following_ && layer == layer_ + 1 && rows == rows_) {
    foretold_us_ += predicted_us_ + rest.us;
    rest_us_ += static_cast<double>(now_ns - layer_ns_) * 1e-3 - predicted_us_;
    if (layer + 1 == num_layers_) end_step(&rest, now_ns);
  } else {
    following_ = false;
  }
  layer_ = layer;
  rows_ = rows;
  layer_ns_ = now_ns;
  predicted_us_ = predicted_us;
}

void StepForecast::end_step(Rest* rest, uint64_t now_ns) {
  const double whole = static_cast<double>(now_ns - first_ns_) * 1e-3, mean = rest_us_ / (num_layers_ - 1);
  if (rest->steps >= kWarm && whole > 0) {
    if (errors_.size() < kKept) errors_.push_back(0);
    errors_[steps_++ % kKept] = static_cast<float>(100 * std::abs(foretold_us_ - whole) / whole);
  }
  rest->us += (rest->steps == 0 ? 1.0 : kRestGain) * (mean - rest->us);
  ++rest->steps;
}

double StepForecast::median_error_pct() const {
  if (errors_.empty()) return 0;
  std::vector<float> sorted = errors_;
  const auto middle = sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

}  // namespace glm53
