// kernels/include/expert_pager.h.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/guard.h"
#include "cuda/device_copy_rates.h"
#include "cuda/device_driver.h"
#include "cuda/device_pager.h"

struct Glm53Pager {
  glm53::DevicePager impl;
};

using glm53::guarded;

int glm53_pager_cuda_driver(PagerDriver* driver) {
  return guarded(-1, [&] {
    *driver = glm53::cuda_driver();
    return 0;
  });
}

int glm53_pager_copy_rates(const PagerSpec* spec, void* compute_stream, uint32_t group, uint64_t budget_ns, double* rates) {
  return guarded(-1, [&] {
    const glm53::CopyRates found = glm53::measure_copies(*spec, compute_stream, group, budget_ns);
    rates[0] = found.engine;
    rates[1] = found.gather;
    return 0;
  });
}

Glm53Pager* glm53_pager_create(const PagerSpec* spec) {
  return guarded<Glm53Pager*>(nullptr, [&] { return new Glm53Pager{glm53::DevicePager(*spec)}; });
}

Glm53Pager* glm53_pager_create_fast(const PagerSpec* spec, const PagerFast* fast) {
  return guarded<Glm53Pager*>(nullptr, [&] {
    if (fast->arena == nullptr) throw glm53::Error(GLM53_INVALID, "arena: must not be NULL");
    glm53::Region* region = fast->region == nullptr ? nullptr : fast->region->impl.get();
    auto parts = std::make_unique<glm53::FastParts>(*spec, *fast, *fast->arena->impl, region);
    return new Glm53Pager{glm53::DevicePager(*spec, std::move(parts))};
  });
}

int glm53_pager_publish(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t selected, uint64_t x, void* stream) {
  return guarded(-1, [&] {
    pager->impl.publish(layer, rows, selected, x, stream);
    return 0;
  });
}

int glm53_pager_finish(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t weights, uint64_t shared, uint64_t out, void* stream) {
  return guarded(-1, [&] {
    pager->impl.finish(layer, rows, weights, shared, out, stream);
    return 0;
  });
}

int glm53_pager_force(Glm53Pager* pager, uint32_t placement, uint64_t seed) {
  return guarded(-1, [&] {
    pager->impl.force(placement, seed);
    return 0;
  });
}

int glm53_pager_lane_up(const Glm53Pager* pager) { return pager->impl.lane_up(); }

const char* glm53_pager_fast_stats(Glm53Pager* pager) {
  thread_local std::string kept;
  return guarded<const char*>(nullptr, [&] {
    kept = pager->impl.fast_stats();
    return kept.c_str();
  });
}

int glm53_pager_split(double kernel_a_us, double kernel_b_us, double link_us, double job_us, const double* lane_us, uint32_t hits,
                      const uint32_t* miss_rows, uint32_t num_misses, double* predicted_us) {
  return guarded(-1, [&] {
    glm53::DeviceCosts costs({1.0}, kernel_a_us, kernel_b_us, link_us, {});
    glm53::LaneRates rates;
    rates.job_us = job_us;
    std::copy(lane_us, lane_us + 8, rates.expert_us.begin());
    if (job_us >= 0) costs.set_lane(rates);
    std::vector<glm53::CostedMiss> misses;
    for (uint32_t i = 0; i < num_misses; ++i) misses.push_back({miss_rows[i]});
    const uint32_t chosen = costs.choose(0, hits, misses, num_misses);
    predicted_us[0] = costs.device_us(hits + num_misses - chosen, num_misses - chosen);
    predicted_us[1] = costs.lane_us(0, misses.data(), chosen);
    return static_cast<int>(chosen);
  });
}

namespace {

glm53::LaneRates read_rates(const double* values) {
  glm53::LaneRates rates;
  rates.job_us = values[0];
  std::copy(values + 1, values + 9, rates.expert_us.begin());
  return rates;
}

void write_rates(const glm53::LaneRates& rates, double* values) {
  values[0] = rates.job_us;
  std::copy(rates.expert_us.begin(), rates.expert_us.end(), values + 1);
}

}  // namespace

int glm53_pager_rates(const uint32_t* experts, const uint32_t* rows, const double* us, uint32_t num_jobs, double* rates) {
  return guarded(-1, [&] {
    glm53::LaneTimings timings;
    for (uint32_t i = 0; i < num_jobs; ++i) timings.add({experts[i], rows[i]}, us[i]);
    write_rates(timings.rates(read_rates(rates)), rates);
    return 0;
  });
}

int glm53_pager_learn(const uint32_t* experts, const double* us, uint32_t num_jobs, double* rates) {
  return guarded(-1, [&] {
    glm53::DeviceCosts costs({1.0}, 0, 0, 0, {});
    costs.set_lane(read_rates(rates));
    for (uint32_t i = 0; i < num_jobs; ++i) {
      const std::vector<glm53::CostedMiss> misses(experts[i], glm53::CostedMiss{1});
      costs.saw_job(0, misses.data(), experts[i], us[i]);
    }
    write_rates(costs.lane(), rates);
    return 0;
  });
}

int64_t glm53_pager_forecast(uint32_t num_layers, const uint32_t* layer, const uint32_t* rows, const uint64_t* now_ns,
                             const double* predicted_us, uint32_t num_requests, double* error_pct) {
  return guarded<int64_t>(-1, [&] {
    glm53::StepForecast forecast(num_layers);
    for (uint32_t i = 0; i < num_requests; ++i) forecast.saw_request(layer[i], rows[i], now_ns[i], predicted_us[i]);
    *error_pct = forecast.median_error_pct();
    return static_cast<int64_t>(forecast.steps());
  });
}

int glm53_pager_step(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t selected, void* stream) {
  return guarded(-1, [&] {
    pager->impl.step(layer, rows, selected, stream);
    return 0;
  });
}

int glm53_pager_ask(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t selected, void* stream) {
  return guarded(-1, [&] {
    pager->impl.ask(layer, rows, selected, stream);
    return 0;
  });
}

int glm53_pager_wait(Glm53Pager* pager, void* stream) {
  return guarded(-1, [&] {
    pager->impl.wait(stream);
    return 0;
  });
}

int glm53_pager_hint(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t ids, uint32_t width, void* stream) {
  return guarded(-1, [&] {
    pager->impl.hint(layer, rows, ids, width, stream);
    return 0;
  });
}

int glm53_pager_catch_up(Glm53Pager* pager, uint64_t timeout_ns) {
  return guarded(-1, [&] {
    pager->impl.catch_up(0, timeout_ns);
    return 0;
  });
}

int glm53_pager_hints(Glm53Pager* pager, uint64_t counters[6]) {
  return guarded(-1, [&] {
    pager->impl.hint_stats(counters);
    return 0;
  });
}

int glm53_pager_put(Glm53Pager* pager, uint32_t record, uint32_t slot) {
  return guarded(-1, [&] {
    pager->impl.put(record, slot);
    return 0;
  });
}

int glm53_pager_vacate(Glm53Pager* pager, uint32_t first_slot, uint32_t count) {
  return guarded(-1, [&] {
    pager->impl.vacate(first_slot, count);
    return 0;
  });
}

int glm53_pager_limit(Glm53Pager* pager, uint32_t usable_slots) {
  return guarded(-1, [&] {
    pager->impl.limit(usable_slots);
    return 0;
  });
}

int glm53_pager_flush(Glm53Pager* pager, void* stream) {
  return guarded(-1, [&] {
    pager->impl.flush(stream);
    return 0;
  });
}

int glm53_pager_where(Glm53Pager* pager, int32_t* slot_of) {
  return guarded(-1, [&] {
    pager->impl.where(slot_of);
    return 0;
  });
}

int glm53_pager_heat_read(Glm53Pager* pager, float* slow, float* fast) {
  return guarded(-1, [&] {
    pager->impl.read_heat(slow, fast);
    return 0;
  });
}

int glm53_pager_heat_write(Glm53Pager* pager, const float* slow, const float* fast) {
  return guarded(-1, [&] {
    pager->impl.write_heat(slow, fast);
    return 0;
  });
}

int glm53_pager_stats(Glm53Pager* pager, uint64_t counters[8]) {
  return guarded(-1, [&] {
    pager->impl.stats(counters);
    return 0;
  });
}

void glm53_pager_close(Glm53Pager* pager) { delete pager; }
