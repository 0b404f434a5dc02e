// What each lane costs on this machine: measured at start, corrected by every job.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace glm53 {

// Straight line y = a + b * x through noisy points, older ones forgotten. Two points of the prior line never are: jobs that all have one
// size cannot tell the slope from the intercept.
class OnlineLine {
 public:
  // scale: a typical x. outlier: a point that lies so many times higher than the line counts as just that many.
  OnlineLine(double a, double b, double scale, double outlier = 5);
  void add(double x, double y);
  double a() const { return a_; }
  double b() const { return b_; }

 private:
  struct Sums {
    double weight = 0, x = 0, y = 0, xx = 0, xy = 0;
    void add(double at_x, double at_y, double times);
  };
  double a_, b_, outlier_;
  Sums prior_, seen_;
};

struct CostOverrides {
  // Microseconds; negative: measured. The names are the settings' (GLM53_CT_A, GLM53_CT_B, GLM53_CT_TZC).
  double ct_a_us = -1;    // CPU lane: fixed cost of a job
  double ct_b_us = -1;    // CPU lane: cost of one expert
  double ct_tzc_us = -1;  // device: extra cost of reading one record in place instead of from a slot
};

class CostModel {
 public:
  // kernel_us: [num_layers][8], one expert with 1..8 rows in a slot, of the device's own kernel. copy_us: one record into a slot.
  CostModel(std::vector<std::array<double, 8>> kernel_us, double copy_us, const CostOverrides& overrides);

  double kernel_us(uint32_t layer, uint32_t rows) const;
  double hit_us(uint32_t layer, uint32_t rows) const { return hot_scale_ * kernel_us(layer, rows); }
  double copy_us() const { return copy_us_; }
  double zero_copy_us(uint32_t layer, uint32_t rows) const {
    return hit_us(layer, rows) + (overrides_.ct_tzc_us > 0 ? overrides_.ct_tzc_us : 0);
  }
  // A job of `experts` experts whose kernel times sum to kernel_sum_us.
  double cpu_job_us(uint32_t experts, double kernel_sum_us) const;

  // A job took us from its publication to the sight of its done entry.
  void saw_job(double kernel_sum_us, double us) { line_.add(kernel_sum_us, us); }
  // The device's own part took us where the unscaled kernel times sum to kernel_sum_us.
  void saw_hot(double kernel_sum_us, double us);

  double ct_a_us() const { return overrides_.ct_a_us >= 0 ? overrides_.ct_a_us : line_.a(); }
  double ct_scale() const { return line_.b(); }
  double hot_scale() const { return hot_scale_; }

 private:
  std::vector<std::array<double, 8>> kernel_us_;
  double copy_us_;
  CostOverrides overrides_;
  double hot_scale_ = 1.0;
  OnlineLine line_;
};

}  // namespace glm53
