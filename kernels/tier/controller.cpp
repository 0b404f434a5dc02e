#include "tier/controller.h"

#include <utility>

namespace glm53 {
namespace {

constexpr uint64_t kIdleTickNs = 50'000'000;  // how often an idle controller looks at the lane

PlannerOptions planner_options(const TierOptions& options, const Device& device) {
  PlannerOptions planner = options.planner;
  planner.min_cpu_experts =
      options.min_cpu_experts >= 0 ? static_cast<uint32_t>(options.min_cpu_experts) : device.default_min_cpu_experts();
  if (options.min_cpu_every > 0) {
    planner.min_cpu_every = static_cast<uint32_t>(options.min_cpu_every);
  } else {
    planner.min_cpu_every = options.min_cpu_experts >= 0 ? 1 : device.default_min_cpu_every();
  }
  return planner;
}

}  // namespace

Controller::Controller(const Arena& arena, const TierOptions& options, Device& device, std::unique_ptr<ExpertBackend> backend,
                       CostModel costs)
    : arena_(arena),
      options_(options),
      cpu_lane_(options.mode == Mode::kFast),
      // A lane in this process needs the other thread: it is what computes next to the caller.
      caller_runs_(options.caller_runs && (!cpu_lane_ || options.backend == BackendKind::kShm)),
      backend_(std::move(backend)),
      fallback_(arena, options.variant),
      heat_(arena.header().num_layers, arena.header().experts_per_layer, options.heat),
      slots_(options.num_slots, static_cast<uint32_t>(arena.header().num_slots)),
      costs_(std::move(costs)),
      planner_(planner_options(options, device), arena.header().experts_per_layer, heat_, slots_, costs_),
      stats_(arena.header().num_layers) {
  load_heat();
  look_at_lane();
  thread_ = std::thread(&Controller::run, this);
}

Controller::~Controller() {
  stop_.store(true);
  request_word_.nudge();
  idle_word_.nudge();
  thread_.join();
}

void Controller::load_heat() {
  std::vector<uint8_t> bytes;
  std::string why;
  try {
    if (options_.heat_file.empty() || !read_file(options_.heat_file, &bytes)) return;
    if (heat_.load(bytes, arena_.header().checkpoint_hash, &why)) return;
  } catch (const Error& error) {
    why = error.what();  // a start without heat is slower for a while, not wrong
  }
  heat_note_ = options_.heat_file + " is ignored: " + why;
}

std::vector<uint8_t> Controller::save_heat() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return heat_.save(arena_.header().checkpoint_hash);
}

void Controller::run() {
  uint64_t next = 1;
  while (!stop_.load(std::memory_order_acquire)) {
    const uint64_t deadline = abi_now_ns() + kIdleTickNs;
    const bool asked = caller_runs_ ? idle_word_.wait(1, deadline, 0) : request_word_.wait(next, deadline, options_.spin_us * 1000);
    if (asked) {
      answer_plan(next);
      answer_cold(next);
      ++next;
    } else {
      const std::lock_guard<std::mutex> lock(serve_mutex_);
      if (cpu_lane_) backend_->watch(abi_now_ns());
      look_at_lane();
    }
  }
}

bool Controller::lane_ready(uint64_t now_ns) {
  if (!cpu_lane_ || !backend_->tick(now_ns)) {
    priced_ = false;
    return false;
  }
  if (!priced_) {
    priced_ = true;
    backend_->probe([this](uint32_t experts, double us) {
      const std::lock_guard<std::mutex> lock(mutex_);
      costs_.saw_job(experts * costs_.kernel_us(0, 1), us);
    });
    return backend_->tick(abi_now_ns());
  }
  return true;
}

void Controller::look_at_lane() {
  const bool up = lane_ready(abi_now_ns());
  LaneSnapshot snapshot;
  snapshot.enabled = cpu_lane_;
  snapshot.up = up;
  if (auto* shm = dynamic_cast<ShmBackend*>(backend_.get())) {
    snapshot.reason = shm->lane().reason();
    snapshot.since_ns = shm->lane().since_ns();
    snapshot.counters = shm->lane().counters();
  }
  lane_up_.store(up, std::memory_order_release);
  const std::lock_guard<std::mutex> lock(mutex_);
  lane_snapshot_ = snapshot;
}

void Controller::answer_plan(uint64_t pass) {
  const std::lock_guard<std::mutex> lock(serve_mutex_);
  if (planned_ >= pass) return;
  planned_ = pass;
  Step& step = this->step(pass);
  // The consumer asks for this pass after it is through with the last one: that one's result buffer is free.
  if (held_buffer_ >= 0 && pass_word_.value() + 1 >= pass) backend_->release(std::exchange(held_buffer_, -1));
  step.plan_error.clear();
  step.cold_error.clear();
  try {
    plan(&step);
  } catch (const std::exception& error) {
    step.plan_error = error.what();
    step.plan.clear();
  }
  plan_word_.post(pass);
}

void Controller::answer_cold(uint64_t pass) {
  const std::lock_guard<std::mutex> lock(serve_mutex_);
  Step& step = this->step(pass);
  if (collected_ >= pass || step.plan.num_cpu_picks == 0) return;
  collected_ = pass;
  try {
    collect(&step);
  } catch (const std::exception& error) {
    step.cold_error = error.what();
  }
  look_at_lane();
  cold_word_.post(pass);
}

void Controller::plan(Step* step) {
  const uint64_t start = abi_now_ns();
  const StepRequest& request = step->request;
  LaneLimits limits;
  if (!request.prefill && lane_ready(start)) limits = backend_->limits();
  limits.cpu = limits.cpu && request.rows <= limits.max_rows;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t passes_done = pass_word_.value();
    slots_.settle(passes_done, failed_pass_.load(std::memory_order_acquire));
    group_picks(request, arena_.header().experts_per_layer, &counts_, &step->plan);
    planner_.place(request, limits, passes_done, &step->plan);
  }
  bool full = false;
  if (step->plan.num_cpu_picks > 0 && !backend_->submit(request, step->plan)) {
    // Nothing was started: the device takes these picks itself.
    full = true;
    for (PlanEntry& entry : step->plan.entries) {
      if (entry.lane == Lane::kCpu) entry.lane = entry.copy ? Lane::kAdmit : Lane::kZeroCopy;
    }
    step->plan.num_cpu_picks = 0;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.lane_full += full;
  count(*step);
  stats_.plan_us += static_cast<double>(abi_now_ns() - start) * 1e-3;
}

void Controller::count(const Step& step) {
  const StepRequest& request = step.request;
  auto& picks = stats_.picks[request.layer];
  const uint64_t record_bytes = arena_.shape(request.layer).record_bytes;
  uint64_t total = 0;
  uint64_t hits = 0;
  for (const PlanEntry& entry : step.plan.entries) {
    const auto lane = static_cast<size_t>(entry.lane);
    picks[lane] += entry.count;
    ++stats_.experts[lane];
    total += entry.count;
    if (entry.lane == Lane::kHit) hits += entry.count;
    if (entry.lane == Lane::kZeroCopy) stats_.bytes_in_place += record_bytes;
    if (entry.copy) stats_.bytes_copied += record_bytes;
  }
  stats_.masked_picks += static_cast<uint64_t>(request.rows) * request.top_k - total;
  if (request.prefill) {
    ++stats_.prefill_steps;
    stats_.prefill_picks += total;
  } else {
    ++stats_.decode_steps;
    stats_.decode_picks += total;
    stats_.decode_hits += hits;
  }
}

void Controller::collect(Step* step) {
  ColdResult result;
  if (!backend_->collect(&result)) {
    recompute(step);
    return;
  }
  step->cold = result.reply;
  held_buffer_ = result.buffer;
  double kernel_sum = 0;
  for (const PlanEntry& entry : step->plan.entries) {
    if (entry.lane == Lane::kCpu) kernel_sum += costs_.kernel_us(step->request.layer, entry.count);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  costs_.saw_job(kernel_sum, result.lane_us);
  stats_.lane_us += result.lane_us;
  stats_.cpu_lane_bytes += result.record_bytes;
  if (result.buffer >= 0) stats_.cpu_expert_bytes += result.record_bytes;
}

void Controller::recompute(Step* step) {
  ColdResult result;
  fallback_.submit(step->request, step->plan);
  fallback_.collect(&result);
  step->cold = result.reply;
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.recomputed_picks += step->plan.num_cpu_picks;
  ++stats_.recomputed_steps;
}

Controller::Snapshot Controller::snapshot() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {stats_, planner_.counters(), lane_snapshot_, slots_.used(), costs_.ct_a_us(), costs_.ct_scale(), costs_.hot_scale()};
}

}  // namespace glm53
