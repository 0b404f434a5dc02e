#include "tier/backend.h"

#include <algorithm>

namespace glm53 {
namespace {

// While a job is open: how often life and deadline are looked at if nothing rings.
constexpr int64_t kCollectSliceNs = 5'000'000;
constexpr uint32_t kProbeRounds = 4;
constexpr uint32_t kProbeExperts = 4;
constexpr double kProbeBudgetUs = 50'000;  // big experts on a slow kernel: what was seen by then has to do

double us_since(uint64_t start_ns) { return static_cast<double>(abi_now_ns() - start_ns) * 1e-3; }

}  // namespace

InProcessBackend::InProcessBackend(const Arena& arena, uint32_t variant) : arena_(arena), pool_(moe_pool_create(variant, 1, nullptr, 0)) {
  if (pool_ == nullptr) throw Error(GLM53_INVALID, moe_last_error());
}

InProcessBackend::~InProcessBackend() { moe_pool_destroy(pool_); }

bool InProcessBackend::submit(const StepRequest& request, const StepPlan& plan) {
  request_ = request;
  plan_ = &plan;
  started_ns_ = abi_now_ns();
  return true;
}

bool InProcessBackend::collect(ColdResult* result) {
  const MoeExpertShape& shape = arena_.shape(request_.layer);
  const size_t needed = static_cast<size_t>(plan_->num_cpu_picks) * shape.hidden;
  if (rows_.size() < needed) rows_.resize(needed);
  outs_.resize(plan_->num_cpu_picks);
  for (uint32_t i = 0; i < plan_->num_cpu_picks; ++i) outs_[i] = i;
  tasks_.clear();
  result->record_bytes = 0;
  uint32_t next = 0;
  for (const PlanEntry& entry : plan_->entries) {
    if (entry.lane != Lane::kCpu) continue;
    const uint64_t id = static_cast<uint64_t>(request_.layer) * arena_.header().experts_per_layer + entry.expert;
    tasks_.push_back(
        {&shape, arena_.record(id), request_.x, &plan_->pick_row[entry.first], rows_.data(), &outs_[next], entry.count, MOE_DTYPE_F32});
    next += entry.count;
    result->record_bytes += shape.record_bytes;
  }
  if (moe_pool_run(pool_, tasks_.data(), static_cast<uint32_t>(tasks_.size())) != 0) {
    throw Error(GLM53_INTERNAL, format("the kernel refused the CPU lane's tasks of layer %u", request_.layer));
  }
  result->reply.rows = rows_.data();
  result->buffer = -1;
  result->lane_us = us_since(started_ns_);
  return true;
}

ShmBackend::ShmBackend(const Arena& arena, Region& region, uint64_t heartbeat_timeout_ns, uint64_t job_timeout_ns, int64_t spin_ns)
    : arena_(arena), lane_(region, heartbeat_timeout_ns, job_timeout_ns), spin_ns_(spin_ns) {}

bool ShmBackend::watch(uint64_t now_ns) {
  lane_.check_lease(now_ns);
  return lane_.tick(now_ns);
}

bool ShmBackend::submit(const StepRequest& request, const StepPlan& plan) {
  job_.layer = request.layer;
  job_.num_rows = request.rows;
  job_.experts.clear();
  job_.rows.clear();
  job_.outs.clear();
  record_bytes_ = 0;
  for (const PlanEntry& entry : plan.entries) {
    if (entry.lane != Lane::kCpu) continue;
    const uint32_t slot = request.layer * arena_.header().experts_per_layer + entry.expert;
    job_.experts.push_back({slot, arena_.generation_of(slot), static_cast<uint32_t>(job_.rows.size()), entry.count});
    for (uint32_t i = entry.first; i < entry.first + entry.count; ++i) {
      job_.outs.push_back(static_cast<uint32_t>(job_.rows.size()));
      job_.rows.push_back(plan.pick_row[i]);
    }
    record_bytes_ += arena_.shape(request.layer).record_bytes;
  }
  started_ns_ = abi_now_ns();
  seq_ = lane_.submit(job_, request.x, started_ns_);
  return seq_ != 0;
}

bool ShmBackend::collect(ColdResult* result) {
  Spinner spinner(spin_ns_);
  for (;;) {
    const uint32_t seen = lane_.bell();
    LaneResult rows;
    switch (lane_.poll(seq_, abi_now_ns(), &rows)) {
      case LaneClient::Poll::kDone:
        result->reply.rows = rows.rows;
        result->buffer = rows.buffer;
        result->lane_us = us_since(started_ns_);
        result->record_bytes = record_bytes_;
        return true;
      case LaneClient::Poll::kFailed:
        return false;
      case LaneClient::Poll::kPending:
        break;
    }
    if (spinner.spin()) continue;
    lane_.wait(seen, kCollectSliceNs);
    lane_.check_lease(abi_now_ns());
  }
}

void ShmBackend::probe(const std::function<void(uint32_t, double)>& saw) {
  const uint32_t most = std::min({kProbeExperts, arena_.header().experts_per_layer, lane_.max_picks()});
  const std::vector<float> x(arena_.shape(0).hidden, 1.0f);
  StepRequest request;
  request.rows = 1;
  request.x = x.data();
  const uint64_t start = abi_now_ns();
  for (uint32_t round = 0; round < kProbeRounds && us_since(start) < kProbeBudgetUs; ++round) {
    for (const uint32_t experts : {uint32_t{1}, most}) {
      StepPlan plan;
      for (uint32_t e = 0; e < experts; ++e) {
        PlanEntry entry;
        entry.expert = (round * most + e) % arena_.header().experts_per_layer;
        entry.first = e;
        entry.count = 1;
        entry.lane = Lane::kCpu;
        plan.entries.push_back(entry);
        plan.pick_row.push_back(0);
      }
      plan.num_cpu_picks = experts;
      ColdResult result;
      if (!submit(request, plan) || !collect(&result)) return;
      release(result.buffer);
      saw(experts, result.lane_us);
    }
  }
}

}  // namespace glm53
