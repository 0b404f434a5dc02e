#include "tier/engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace glm53 {
namespace {

constexpr uint64_t kPickRowBytes = 64u << 20;  // most memory for the pick rows of one pass: longer prefills go in blocks of rows
constexpr auto kBeatPeriod = std::chrono::milliseconds(50);

double us_between(uint64_t start_ns, uint64_t end_ns) { return static_cast<double>(end_ns - start_ns) * 1e-3; }

CostModel measure_costs(const Arena& arena, Device& device, const CostOverrides& overrides) {
  std::vector<std::array<double, 8>> kernel_us(arena.header().num_layers);
  for (uint32_t layer = 0; layer < arena.header().num_layers; ++layer) {
    // Layers of one shape cost the same.
    uint32_t same = 0;
    while (same < layer && std::memcmp(&arena.shape(same), &arena.shape(layer), sizeof(MoeExpertShape)) != 0) ++same;
    if (same < layer) {
      kernel_us[layer] = kernel_us[same];
      continue;
    }
    const double one = device.measure_kernel_us(layer, 1);
    const double eight = std::max(one, device.measure_kernel_us(layer, 8));
    for (uint32_t rows = 1; rows <= 8; ++rows) kernel_us[layer][rows - 1] = one + (eight - one) * (rows - 1) / 7;
  }
  return CostModel(std::move(kernel_us), device.measure_copy_us(), overrides);
}

std::unique_ptr<ExpertBackend> make_backend(const Arena& arena, Region* region, const TierOptions& options) {
  if (options.mode == Mode::kExact || options.backend == BackendKind::kInProcess)
    return std::make_unique<InProcessBackend>(arena, options.variant);
  if (region == nullptr) throw Error(GLM53_INVALID, "backend shm needs a control region: pass one, or choose backend in_process");
  if (region->words().arena_generation != arena.header().generation) {
    throw Error(GLM53_MISMATCH, format("%s belongs to arena generation 0x%llx, the arena has 0x%llx", region->path().c_str(),
                                       static_cast<unsigned long long>(region->words().arena_generation),
                                       static_cast<unsigned long long>(arena.header().generation)));
  }
  return std::make_unique<ShmBackend>(arena, *region, options.heartbeat_timeout_ms * 1000000, options.ct_timeout_ms * 1000000,
                                      options.spin_us * 1000);
}

}  // namespace

TierEngine::TierEngine(const Arena& arena, Region* region, const TierOptions& options) : arena_(arena), region_(region), options_(options) {
  CpuDeviceOptions device;
  device.num_slots = options.num_slots;
  device.variant = options.variant;
  device.threads = options.threads;
  device.cpus = options.cpus;
  device.spin_ns = options.spin_us * 1000;
  device_ = std::make_unique<CpuDevice>(arena, device);
  controller_ = std::make_unique<Controller>(arena, options, *device_, make_backend(arena, region, options),
                                             measure_costs(arena, *device_, options.costs));
  housekeeper_ = std::thread(&TierEngine::keep_house, this);
}

TierEngine::~TierEngine() {
  {
    const std::lock_guard<std::mutex> lock(house_mutex_);
    closing_ = true;
  }
  house_wake_.notify_all();
  housekeeper_.join();
  save_heat();
}

void TierEngine::keep_house() {
  auto next_save = std::chrono::steady_clock::now() + std::chrono::seconds(options_.heat_period_s);
  std::unique_lock<std::mutex> lock(house_mutex_);
  while (!closing_) {
    if (region_ != nullptr) abi_store(&region_->words().worker_beat, abi_now_ns());
    if (std::chrono::steady_clock::now() >= next_save) {
      next_save += std::chrono::seconds(options_.heat_period_s);
      lock.unlock();
      save_heat();
      lock.lock();
    }
    house_wake_.wait_for(lock, kBeatPeriod, [this] { return closing_; });
  }
}

void TierEngine::save_heat() {
  if (options_.heat_file.empty()) return;
  bool saved = true;
  try {
    write_heat_file(options_.heat_file, controller_->save_heat());
  } catch (const Error&) {
    saved = false;  // a full disk must not stop the answers; the statistics tell
  }
  controller_->update([saved](TierStats& stats, CostModel&) { ++(saved ? stats.heat_saves : stats.heat_errors); });
}

void TierEngine::forward(const ForwardArgs& args) {
  const std::lock_guard<std::mutex> lock(forward_mutex_);
  if (broken_) throw Error(GLM53_INTERNAL, "the tier engine is broken: its controller did not answer earlier");
  if (args.layer >= arena_.header().num_layers) {
    throw Error(GLM53_INVALID, format("layer is %u: the arena has layers 0..%u", args.layer, arena_.header().num_layers - 1));
  }
  if (args.top_k < 1 || args.top_k > 4096) throw Error(GLM53_INVALID, format("top_k is %u: 1..4096 is expected", args.top_k));
  const bool prefill = args.prefill || args.rows > MOE_MAX_ROWS;
  const uint64_t row_bytes = static_cast<uint64_t>(args.top_k) * arena_.shape(args.layer).hidden * sizeof(float);
  const auto block = static_cast<uint32_t>(std::max<uint64_t>(MOE_MAX_ROWS, kPickRowBytes / row_bytes));
  for (uint32_t first = 0; first < args.rows; first += block) {
    ForwardArgs part = args;
    part.rows = std::min(block, args.rows - first);
    part.x += static_cast<size_t>(first) * arena_.shape(args.layer).hidden;
    part.out += static_cast<size_t>(first) * arena_.shape(args.layer).hidden;
    part.sel += static_cast<size_t>(first) * args.top_k;
    part.weights += static_cast<size_t>(first) * args.top_k;
    part.prefill = prefill;
    run_block(part);
  }
}

// The one order of all devices: stage -> publish -> wait plan -> compute hot -> wait cold -> combine.
void TierEngine::run_block(const ForwardArgs& args) {
  const uint64_t pass = ++pass_;
  Step& step = controller_->step(pass);
  step.request = {pass, args.layer, args.rows, args.top_k, args.x, args.sel, args.prefill};
  device_->stage(&step.request);
  device_->signal(controller_->request_word(), pass);
  bool planned = false;
  bool cold_seen = false;
  try {
    if (controller_->caller_runs()) controller_->answer_plan(pass);
    device_->wait(controller_->plan_word(), pass, "plan");
    planned = true;
    if (!step.plan_error.empty()) throw Error(GLM53_INVALID, step.plan_error);
    const uint64_t start = abi_now_ns();
    for (const PlanEntry& entry : step.plan.entries) {
      if (!entry.copy) continue;
      const uint64_t id = static_cast<uint64_t>(args.layer) * arena_.header().experts_per_layer + entry.expert;
      device_->copy_record(entry.slot, arena_.record(id), arena_.shape(args.layer).record_bytes);
    }
    const uint64_t copied = abi_now_ns();
    device_->compute(step.request, step.plan);
    const uint64_t computed = abi_now_ns();
    if (step.plan.num_cpu_picks > 0) {
      if (controller_->caller_runs()) controller_->answer_cold(pass);
      device_->wait(controller_->cold_word(), pass, "cold");
      cold_seen = true;
      if (!step.cold_error.empty()) throw Error(GLM53_INTERNAL, step.cold_error);
    }
    const uint64_t cold = abi_now_ns();
    device_->combine(step.request, step.plan, step.cold, args.weights, args.out);
    const uint64_t combined = abi_now_ns();
    controller_->update([&](TierStats& stats, CostModel& costs) {
      costs.saw_hot(step.plan.hot_us, us_between(copied, computed));
      stats.hot_us += us_between(start, computed);
      stats.overrun_us += us_between(computed, cold);
      stats.combine_us += us_between(cold, combined);
    });
  } catch (...) {
    // The controller still owns the step until it has answered everything that it was asked.
    if (!planned ||
        (step.plan.num_cpu_picks > 0 && !cold_seen && !controller_->cold_word()->wait(pass, abi_now_ns() + 60'000'000'000, 0))) {
      broken_ = true;
    }
    controller_->mark_failed(pass);
    controller_->update([](TierStats& stats, CostModel&) { ++stats.failed_passes; });
    device_->signal(controller_->pass_word(), pass);
    throw;
  }
  device_->signal(controller_->pass_word(), pass);
}

VerifyReport TierEngine::verify() {
  VerifyReport report;
  // Records are immutable here, so they are read without holding anybody up.
  for (uint64_t slot = 0; slot < arena_.header().num_slots; ++slot) {
    ++report.records;
    if (!arena_.check(slot)) report.bad_records.push_back(slot);
  }
  {
    const std::lock_guard<std::mutex> lock(forward_mutex_);
    controller_->for_each_resident([&](uint32_t slot, uint32_t record) {
      ++report.slots;
      const uint32_t bytes = arena_.shape(record / arena_.header().experts_per_layer).record_bytes;
      if (std::memcmp(device_->slot_bytes(static_cast<int32_t>(slot)), arena_.record(record), bytes) != 0) report.bad_slots.push_back(slot);
    });
  }
  const uint64_t failures = report.bad_records.size() + report.bad_slots.size();
  controller_->update([failures](TierStats& stats, CostModel&) { stats.checksum_failures += failures; });
  return report;
}

void TierEngine::repair(Arena& arena, uint64_t record, const uint8_t* data) {
  if (&arena != &arena_) throw Error(GLM53_INVALID, "repair: the arena is another engine's");
  if (record >= arena.header().num_slots)
    throw Error(GLM53_INVALID, format("record %llu: the arena has %llu", static_cast<unsigned long long>(record),
                                      static_cast<unsigned long long>(arena.header().num_slots)));
  const std::lock_guard<std::mutex> lock(forward_mutex_);
  arena.rewrite_begin(record);
  std::memcpy(arena.record(record), data, arena.shape(static_cast<uint32_t>(record / arena.header().experts_per_layer)).record_bytes);
  arena.rewrite_end(record);
  controller_->forget(static_cast<uint32_t>(record));
}

std::string TierEngine::stats_json() {
  const Controller::Snapshot s = controller_->snapshot();
  const TierStats& t = s.stats;
  std::array<uint64_t, kNumLanes> by_lane{};
  std::string by_layer = "[";
  for (const auto& layer : t.picks) {
    for (uint32_t lane = 0; lane < kNumLanes; ++lane) by_lane[lane] += layer[lane];
    by_layer += (by_layer.size() > 1 ? ", " : "") + lane_counts_json(layer);
  }
  by_layer += "]";
  JsonObject lane;
  lane.add("state", std::string(!s.lane.enabled ? "OFF"
                                : s.lane.up     ? "UP"
                                                : "DOWN"))
      .add("reason", std::string(s.lane.enabled ? down_reason_name(s.lane.reason) : "mode exact has no CPU lane"));
  lane.add("for_s", s.lane.since_ns == 0 ? 0.0 : us_between(s.lane.since_ns, abi_now_ns()) * 1e-6);
  lane.add("ups", s.lane.counters.ups).add("aborts", s.lane.counters.aborts).add("jobs", s.lane.counters.submitted);
  lane.add("done", s.lane.counters.done).add("refused", s.lane.counters.refused).add("full", s.lane.counters.full + t.lane_full);
  JsonObject o;
  o.add("mode", std::string(options_.mode == Mode::kFast ? "fast" : "exact"));
  o.add("device", std::string(device_->name())).add("backend", std::string(controller_->backend_name()));
  o.add("kernel", std::string(moe_variant_name(moe_pool_variant(device_->pool()))));
  o.add("kernel_reason", std::string(moe_pool_reason(device_->pool())));
  o.add_raw("lane", lane.text()).add("slots", uint64_t{options_.num_slots}).add("slots_used", uint64_t{s.slots_used});
  o.add("records", arena_.header().num_slots).add("arena_bytes", arena_.header().total_bytes);
  o.add_raw("picks", lane_counts_json(by_lane)).add_raw("experts", lane_counts_json(t.experts)).add_raw("picks_by_layer", by_layer);
  o.add("decode_steps", t.decode_steps).add("prefill_steps", t.prefill_steps);
  o.add("decode_picks", t.decode_picks).add("decode_hits", t.decode_hits).add("prefill_picks", t.prefill_picks);
  o.add("masked_picks", t.masked_picks);
  o.add("hit_ratio", t.decode_picks == 0 ? 0.0 : static_cast<double>(t.decode_hits) / static_cast<double>(t.decode_picks));
  o.add("admissions", s.planner.admissions).add("evictions", s.planner.evictions);
  o.add("bytes_copied", t.bytes_copied).add("bytes_in_place", t.bytes_in_place);
  o.add("cpu_lane_bytes", t.cpu_lane_bytes).add("cpu_expert_bytes", t.cpu_expert_bytes);
  o.add("recomputed_picks", t.recomputed_picks).add("recomputed_steps", t.recomputed_steps).add("aborts", s.lane.counters.aborts);
  o.add("failed_passes", t.failed_passes).add("checksum_failures", t.checksum_failures);
  o.add("plan_us", t.plan_us)
      .add("lane_us", t.lane_us)
      .add("hot_us", t.hot_us)
      .add("overrun_us", t.overrun_us)
      .add("combine_us", t.combine_us);
  o.add("ct_a_us", s.ct_a_us).add("ct_scale", s.ct_scale).add("hot_scale", s.hot_scale);
  o.add("heat_saves", t.heat_saves).add("heat_errors", t.heat_errors).add("heat_note", controller_->heat_note());
  return o.text();
}

}  // namespace glm53
