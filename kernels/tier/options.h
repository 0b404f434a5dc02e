// Options of the engine and of the server as `name=value` lines: one C entry point, no struct to mirror, a typo is refused by name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tier/cost_model.h"
#include "tier/job_server.h"
#include "tier/planner.h"

namespace glm53 {

enum class Mode { kFast, kExact };
enum class BackendKind { kShm, kInProcess };

struct TierOptions {
  Mode mode = Mode::kFast;
  BackendKind backend = BackendKind::kShm;
  uint32_t num_slots = 0;
  uint32_t variant = MOE_VARIANT_AUTO;
  uint32_t threads = 1;
  std::vector<int32_t> cpus;
  uint64_t ct_timeout_ms = 500;          // a job that takes longer is abandoned
  uint64_t heartbeat_timeout_ms = 1000;  // a server that shows no life for longer is off
  int64_t min_cpu_experts = -1;          // -1: the device's default
  int64_t min_cpu_every = -1;            // -1: 1 when min_cpu_experts is given, else the device's default
  int64_t spin_us = 30;                  // polling before every sleep
  bool caller_runs = true;               // the waiting thread may do the controller's work (tier/controller.h)
  CostOverrides costs;
  PlannerOptions planner;
  HeatParams heat;
  std::string heat_file;  // empty: heat is not kept
  uint64_t heat_period_s = 180;
};

TierOptions parse_tier_options(const std::string& text);
ServerOptions parse_server_options(const std::string& text);

}  // namespace glm53
