// What a decode step of one layer costs on a device with a link to host memory and a CPU lane beside it, and how to split the misses.
//
//   device = kernel_a + kernel_b * experts computed there + link(records copied)      link(n) = a + b * n, 0 for none
//   lane   = job + sum over its experts of expert_us[rows]
//
// Both run at the same time, so a step takes the longer of the two. Everything is in microseconds. Rates come from a probe (device_lane.h)
// and are corrected by every job and every copy. Plain arithmetic: no clock, no thread.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tier/cost_model.h"

namespace glm53 {

inline double us_between(uint64_t start_ns, uint64_t end_ns) { return static_cast<double>(end_ns - start_ns) * 1e-3; }

// Of records like those of layer 0: what a job costs by itself, and one expert with 1..8 rows.
struct LaneRates {
  double job_us = 0;
  std::array<double, 8> expert_us{};
};

// One record that is missing in the device: `rows` picks of the step use it.
struct CostedMiss {
  uint32_t rows;
};

class DeviceCosts {
 public:
  // layer_scale: record bytes of each layer over those of layer 0.
  DeviceCosts(std::vector<double> layer_scale, double kernel_a_us, double kernel_b_us, double link_us, const CostOverrides& overrides);

  // A new lane has been probed; what was learned about the one before is forgotten.
  void set_lane(const LaneRates& rates);
  // What a job and its experts cost as far as is known now: the probe's rates, corrected by the jobs since.
  LaneRates lane() const;
  void set_link(double record_us);

  // ahead: records' worth of bytes that the link still has to move before `copied` whole ones.
  double device_us(uint32_t computed, uint32_t copied, double ahead = 0) const;
  // The first `count` misses as one job.
  double lane_us(uint32_t layer, const CostedMiss* misses, uint32_t count) const;
  // How many of the misses, coldest first, go to the lane so that both sides end together. hits: experts that are computed on the device
  // anyway; most: what a job may hold. A lane that is not in use must win by more than one that is, so that noise does not switch it.
  uint32_t choose(uint32_t layer, uint32_t hits, const std::vector<CostedMiss>& misses, uint32_t most, double ahead = 0);

  void saw_job(uint32_t layer, const CostedMiss* misses, uint32_t count, double us);
  void saw_copies(uint32_t records, double us) { link_.add(records, us); }

  double job_us() const { return overrides_.ct_a_us >= 0 ? overrides_.ct_a_us : line_.a(); }
  double expert_us(uint32_t rows) const;
  double link_us() const { return overrides_.ct_tzc_us >= 0 ? overrides_.ct_tzc_us : link_.b(); }
  bool lane_known() const { return lane_known_; }
  // False when both costs of the lane were given: nothing that is timed changes them.
  bool lane_measured() const { return overrides_.ct_a_us < 0 || overrides_.ct_b_us < 0; }

 private:
  // What an expert costs over its nominal time.
  double slope() const;
  // Of the lane's experts, before the correction by line_.
  double nominal_us(uint32_t layer, const CostedMiss* misses, uint32_t count) const;

  std::vector<double> layer_scale_;
  double kernel_a_us_, kernel_b_us_;
  CostOverrides overrides_;
  LaneRates lane_;
  bool lane_known_ = false;
  bool using_lane_ = false;
  OnlineLine line_;  // a job's time over the nominal time of its experts
  OnlineLine link_;  // time of a step's copies over their number
};

// How well whole decode steps are foretold: from one layer's request to the next one's, what the costs say plus what the rest of a layer
// (attention, router, shared expert) took in earlier steps. A step's own times are used only after its error has been noted, and one whose
// layers do not follow each other with one number of rows says nothing.
class StepForecast {
 public:
  explicit StepForecast(uint32_t num_layers) : num_layers_(num_layers) {}
  // The layer's request was seen and its step is planned to take predicted_us.
  void saw_request(uint32_t layer, uint32_t rows, uint64_t now_ns, double predicted_us);
  uint64_t steps() const { return steps_; }
  // Median of |foretold - measured| / measured over the last steps, in percent; 0 before the first.
  double median_error_pct() const;

 private:
  static constexpr uint32_t kWarm = 16;  // steps of a batch size whose error does not count: there was nothing to go by
  static constexpr uint32_t kKept = 4096;
  struct Rest {
    double us = 0;
    uint32_t steps = 0;
  };

  void end_step(Rest* rest, uint64_t now_ns);

  const uint32_t num_layers_;
  std::array<Rest, 9> rest_{};  // by rows
  uint32_t layer_ = 0, rows_ = 0;
  bool following_ = false;  // layer_ was the last one seen of a step without gaps
  uint64_t layer_ns_ = 0, first_ns_ = 0;
  double predicted_us_ = 0;               // of layer_
  double foretold_us_ = 0, rest_us_ = 0;  // of the step so far: what was foretold, and what the costs did not explain
  uint64_t steps_ = 0;
  std::vector<float> errors_;
};

}  // namespace glm53
