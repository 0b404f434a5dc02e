#include "tier/options.h"

#include <cerrno>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>

#include "tier/error.h"

namespace glm53 {
namespace {

using Setter = std::function<void(const std::string&)>;
using Setters = std::map<std::string, Setter>;

template <typename Number>
Setter number(const char* name, Number* target, double low, double high) {
  return [=](const std::string& value) {
    errno = 0;
    char* end = nullptr;
    const double parsed = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0' || errno != 0 || !(parsed >= low && parsed <= high)) {
      throw Error(GLM53_INVALID, format("%s is %s: a number from %g to %g is expected", name, value.c_str(), low, high));
    }
    *target = static_cast<Number>(parsed);
  };
}

// 64-bit seeds do not fit a double.
Setter seed(uint64_t* target) {
  return [=](const std::string& value) { *target = std::strtoull(value.c_str(), nullptr, 10); };
}

template <typename Value>
Setter choice(const char* name, Value* target, std::map<std::string, Value> values) {
  return [=](const std::string& value) {
    const auto found = values.find(value);
    if (found == values.end()) {
      std::string known;
      for (const auto& entry : values) known += (known.empty() ? "" : ", ") + entry.first;
      throw Error(GLM53_INVALID, format("%s is %s: one of %s is expected", name, value.c_str(), known.c_str()));
    }
    *target = found->second;
  };
}

Setter variant(uint32_t* target) {
  return [=](const std::string& value) {
    if (value == "auto") {
      *target = MOE_VARIANT_AUTO;
      return;
    }
    std::string known = "auto";
    for (uint32_t v = MOE_VARIANT_SCALAR; v <= MOE_VARIANT_AVXVNNI; ++v) {
      if (value == moe_variant_name(v)) {
        *target = v;
        return;
      }
      known += std::string(", ") + moe_variant_name(v);
    }
    throw Error(GLM53_INVALID, format("variant is %s: one of %s is expected", value.c_str(), known.c_str()));
  };
}

Setter cpu_list(std::vector<int32_t>* target) {
  return [=](const std::string& value) {
    target->clear();
    std::istringstream items(value);
    for (std::string item; std::getline(items, item, ',');) {
      char* end = nullptr;
      const long cpu = std::strtol(item.c_str(), &end, 10);
      if (item.empty() || *end != '\0' || cpu < 0 || cpu > 1 << 20) {
        throw Error(GLM53_INVALID, format("cpus is %s: a list of logical CPU numbers is expected", value.c_str()));
      }
      target->push_back(static_cast<int32_t>(cpu));
    }
  };
}

void parse(const std::string& text, const Setters& setters) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) continue;
    const size_t equals = line.find('=');
    const auto found = setters.find(line.substr(0, equals));
    if (equals == std::string::npos || found == setters.end()) throw Error(GLM53_INVALID, format("unknown option: %s", line.c_str()));
    found->second(line.substr(equals + 1));
  }
}

}  // namespace

TierOptions parse_tier_options(const std::string& text) {
  TierOptions o;
  parse(text,
        {
            {"mode", choice<Mode>("mode", &o.mode, {{"fast", Mode::kFast}, {"exact", Mode::kExact}})},
            {"backend", choice<BackendKind>("backend", &o.backend, {{"shm", BackendKind::kShm}, {"in_process", BackendKind::kInProcess}})},
            {"num_slots", number("num_slots", &o.num_slots, 0, 1e7)},
            {"variant", variant(&o.variant)},
            {"threads", number("threads", &o.threads, 1, 1024)},
            {"cpus", cpu_list(&o.cpus)},
            {"ct_timeout_ms", number("ct_timeout_ms", &o.ct_timeout_ms, 1, 600000)},
            {"heartbeat_timeout_ms", number("heartbeat_timeout_ms", &o.heartbeat_timeout_ms, 1, 600000)},
            {"min_cpu_experts", number("min_cpu_experts", &o.min_cpu_experts, -1, 65536)},
            {"min_cpu_every", number("min_cpu_every", &o.min_cpu_every, -1, 1e9)},
            {"spin_us", number("spin_us", &o.spin_us, 0, 100000)},
            {"caller_runs", choice<bool>("caller_runs", &o.caller_runs, {{"0", false}, {"1", true}})},
            {"ct_a_us", number("ct_a_us", &o.costs.ct_a_us, -1, 1e9)},
            {"ct_b_us", number("ct_b_us", &o.costs.ct_b_us, -1, 1e9)},
            {"ct_tzc_us", number("ct_tzc_us", &o.costs.ct_tzc_us, -1, 1e9)},
            {"admit_after", number("admit_after", &o.planner.admit_after, 1, 1e6)},
            {"max_admissions", number("max_admissions", &o.planner.max_admissions, 0, 65536)},
            {"admit_margin", number("admit_margin", &o.planner.admit_margin, 0, 100)},
            {"heat_slow_half_life", number("heat_slow_half_life", &o.heat.slow_half_life, 0.1, 1e6)},
            {"heat_fast_half_life", number("heat_fast_half_life", &o.heat.fast_half_life, 0.1, 1e6)},
            {"heat_fast_weight", number("heat_fast_weight", &o.heat.fast_weight, 0, 100)},
            {"heat_forget_below", number("heat_forget_below", &o.heat.forget_below, 0, 1)},
            {"planner", choice<bool>("planner", &o.planner.fuzz, {{"cost", false}, {"fuzz", true}})},
            {"seed", seed(&o.planner.seed)},
            {"heat_file", [&o](const std::string& value) { o.heat_file = value; }},
            {"heat_period_s", number("heat_period_s", &o.heat_period_s, 1, 1e6)},
        });
  return o;
}

ServerOptions parse_server_options(const std::string& text) {
  ServerOptions o;
  int64_t spin_us = -1;
  parse(text, {
                  {"variant", variant(&o.variant)},
                  {"threads", number("threads", &o.threads, 1, 1024)},
                  {"cpus", cpu_list(&o.cpus)},
                  {"beat_thread", choice<bool>("beat_thread", &o.beat_thread, {{"0", false}, {"1", true}})},
                  {"experts_per_step", number("experts_per_step", &o.experts_per_step, 0, 65536)},
                  {"spin_us", number("spin_us", &spin_us, -1, 100000)},
                  {"tune", choice<bool>("tune", &o.tune, {{"0", false}, {"1", true}})},
                  {"huge_pages", choice<bool>("huge_pages", &o.huge_pages, {{"0", false}, {"1", true}})},
              });
  o.spin_ns = spin_us < 0 ? -1 : spin_us * 1000;
  return o;
}

}  // namespace glm53
