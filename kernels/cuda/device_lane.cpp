#include "cuda/device_lane.h"

#include <algorithm>
#include <cmath>

#include "tier/error.h"
#include "tier/spin.h"

namespace glm53 {
namespace {

constexpr uint32_t kProbeExperts = 4;
constexpr ProbeJob kProbeJobs[] = {{1, 1}, {kProbeExperts, 1}, {2, 1}, {kProbeExperts, 2}, {kProbeExperts, 4}, {kProbeExperts, 8}};
constexpr uint32_t kProbeRounds = 12;       // the first wakes threads and CPUs and does not count
constexpr double kProbeBudgetUs = 250'000;  // big experts on a slow kernel: what was seen by then has to do
// Of a series while steps go on, the first ones wake threads and do not count.
constexpr ProbeJob kSeries[] = {{1, 1}, {2, 1}, {1, 1}, {kProbeExperts, 1}, {2, 1}, {kProbeExperts, 1}, {1, 1}, {2, 1}, {1, 1}, {4, 1}};
constexpr uint32_t kEnoughJobs = 64;
constexpr uint32_t kSeriesWarm = 2, kSeriesLength = sizeof(kSeries) / sizeof(kSeries[0]);
constexpr uint64_t kFirstSeriesNs = 300'000'000;  // after the probe, which may have met a machine that was still starting
// Then as often as this, and half as often each time while nothing new is found: a series reads some 20 records. Fewer than kEnoughJobs in
// that time tell little: each of them found everybody asleep, so that the lane seems dear and gets no more of them.
constexpr uint64_t kSeriesNs = 1'000'000'000, kLongestSeriesNs = 8'000'000'000;
constexpr double kNews = 0.2;          // a job of kProbeExperts costs so much more or less than was thought
constexpr uint16_t kHalfOne = 0x3C00;  // 1.0 in fp16
constexpr int64_t kBellNs = 1'000'000;
constexpr uint64_t kHoldOffNs = 500'000'000, kLongestHoldOffNs = 60'000'000'000;
constexpr uint32_t kTrustedJobs = 64;  // served in a row: a server that was too slow is not any more

double us_since(uint64_t start_ns) { return static_cast<double>(abi_now_ns() - start_ns) * 1e-3; }

}  // namespace

DeviceLane::DeviceLane(const PagerSpec& spec, const PagerFast& fast, const Arena& arena, Region& region)
    : arena_(arena),
      region_(region),
      lane_(region, fast.heartbeat_timeout_ns, fast.job_timeout_ns),
      top_k_(spec.top_k),
      max_rows_(spec.max_rows),
      region_on_device_(fast.region_on_device),
      own_rows_(fast.own_rows),
      own_rows_on_device_(fast.own_rows_on_device),
      series_pause_ns_(kSeriesNs),
      hold_off_ns_(kHoldOffNs) {
  const AbiCtlHeader& words = region.words();
  if (words.max_rows < spec.max_rows || words.max_picks < spec.max_rows * spec.top_k) {
    throw Error(GLM53_INVALID, format("the control region holds %u rows and %u picks, steps have up to %u and %u", words.max_rows,
                                      words.max_picks, spec.max_rows, spec.max_rows * spec.top_k));
  }
  if (words.num_buffers < 3) throw Error(GLM53_INVALID, "the control region needs 3 job buffers: two for steps, one for the probe");
  if (words.arena_generation != arena.header().generation) {
    throw Error(GLM53_MISMATCH, format("the control region belongs to arena generation 0x%llx, the arena has 0x%llx",
                                       static_cast<unsigned long long>(words.arena_generation),
                                       static_cast<unsigned long long>(arena.header().generation)));
  }
  pool_ = moe_pool_create(fast.variant, 1, nullptr, 0);
  if (pool_ == nullptr) throw Error(GLM53_INVALID, moe_last_error());
}

DeviceLane::~DeviceLane() { moe_pool_destroy(pool_); }

uint64_t DeviceLane::on_device(const void* in_region) const {
  return region_on_device_ + static_cast<uint64_t>(static_cast<const uint8_t*>(in_region) - reinterpret_cast<uint8_t*>(&region_.words()));
}

uint64_t DeviceLane::x_on_device(uint64_t number) const { return on_device(region_.x(buffer_of(number))); }

void DeviceLane::look(uint64_t now_ns) {
  if (!lane_.up()) {
    probed_ = false;
    const bool slow = lane_.reason() == DownReason::kJobTimeout || lane_.reason() == DownReason::kHeartbeatLost;
    if (slow && lane_.since_ns() != slow_since_ns_) {
      slow_reason_ = lane_.reason();
      slow_since_ns_ = lane_.since_ns();
      hold_until_ns_ = now_ns + hold_off_ns_;
      hold_off_ns_ = std::min(2 * hold_off_ns_, kLongestHoldOffNs);
      served_ = 0;
    }
  }
  up_.store(lane_.up() && now_ns >= hold_until_ns_, std::memory_order_release);
}

bool DeviceLane::begin(uint64_t now_ns) {
  if (held_ >= 0) lane_.release(static_cast<uint32_t>(held_));
  held_ = -1;
  abi_store(&region_.words().worker_beat, now_ns);
  lane_.tick(now_ns);
  look(now_ns);
  return up();
}

void DeviceLane::watch(uint64_t now_ns) {
  abi_store(&region_.words().worker_beat, now_ns);
  lane_.check_lease(now_ns);
  lane_.tick(now_ns);
  look(now_ns);
}

bool DeviceLane::submit(uint64_t number, uint32_t layer, uint32_t rows, const std::vector<LaneExpert>& experts,
                        const std::vector<uint32_t>& picks) {
  job_.layer = layer;
  job_.num_rows = rows;
  job_.experts.clear();
  job_.rows.clear();
  job_.outs.clear();
  for (const LaneExpert& e : experts) {
    const uint32_t slot = layer * arena_.header().experts_per_layer + e.expert;
    job_.experts.push_back({slot, arena_.generation_of(slot), static_cast<uint32_t>(job_.rows.size()), e.count});
    for (uint32_t i = e.first; i < e.first + e.count; ++i) {
      job_.rows.push_back(picks[i] / top_k_);
      job_.outs.push_back(picks[i]);
    }
  }
  buffer_ = buffer_of(number);
  submitted_ns_ = abi_now_ns();
  // The ring keeps a few answers only. The server goes by the order of jobs, so this one's answer is there by the next job but one.
  take_sample(submitted_ns_);
  seq_ = lane_.submit_in_place(job_, buffer_, submitted_ns_);
  recent_jobs_ += seq_ != 0;
  return seq_ != 0;
}

DeviceLane::Answer DeviceLane::poll(uint64_t now_ns) {
  bell_ = lane_.bell();
  LaneResult result;
  switch (lane_.poll(seq_, now_ns, &result)) {
    case LaneClient::Poll::kPending:
      return Answer::kPending;
    case LaneClient::Poll::kDone:
      held_ = result.buffer;
      if (++served_ == kTrustedJobs) hold_off_ns_ = kHoldOffNs;
      rows_on_device_ = on_device(result.rows);
      job_us_ = us_since(submitted_ns_);
      server_us_ = static_cast<double>(result.done_ns - result.claimed_ns) * 1e-3;
      counters_.bytes += static_cast<uint64_t>(job_.experts.size()) * arena_.shape(job_.layer).record_bytes;
      return Answer::kServed;
    case LaneClient::Poll::kFailed:
      break;
  }
  look(now_ns);
  compute_here();
  return Answer::kComputedHere;
}

void DeviceLane::compute_here() {
  rows_on_device_ = own_rows_on_device_;
  counters_.recomputed_picks += job_.rows.size();
  ++counters_.recomputed_steps;
  std::vector<MoeTask> tasks;
  for (const AbiJobExpert& e : job_.experts) {
    tasks.push_back({&arena_.shape(job_.layer), arena_.record(e.arena_slot), region_.x(buffer_), &job_.rows[e.first_pick], own_rows_,
                     &job_.outs[e.first_pick], e.num_picks, MOE_DTYPE_F16});
  }
  if (moe_pool_run(pool_, tasks.data(), static_cast<uint32_t>(tasks.size())) != 0) {
    throw Error(GLM53_INTERNAL, format("the kernel refused the CPU lane's tasks of layer %u: %s", job_.layer, moe_last_error()));
  }
}

void DeviceLane::wait_for_bell() {
  lane_.wait(bell_, kBellNs);
  lane_.check_lease(abi_now_ns());
}

uint32_t DeviceLane::timed_experts() const {
  return std::min({kProbeExperts, arena_.header().experts_per_layer, region_.words().max_picks / max_rows_});
}

uint64_t DeviceLane::submit_timed(ProbeJob size, uint64_t now_ns) {
  LaneJob job;
  job.num_rows = std::min(size.rows, region_.words().max_rows);
  for (uint32_t e = 0; e < std::min(size.experts, timed_experts()); ++e) {
    // Other records each time: steps do not find theirs in a cache either.
    const uint32_t record = probe_record_++ % arena_.header().experts_per_layer;
    job.experts.push_back({record, arena_.generation_of(record), e * job.num_rows, job.num_rows});
    for (uint32_t row = 0; row < job.num_rows; ++row) {
      job.outs.push_back(static_cast<uint32_t>(job.rows.size()));
      job.rows.push_back(row);
    }
  }
  return lane_.submit_in_place(job, region_.words().num_buffers - 1, now_ns);
}

double DeviceLane::time_job(ProbeJob job) {
  const uint64_t start_ns = abi_now_ns();
  const uint64_t seq = submit_timed(job, start_ns);
  if (seq == 0) return -1;
  Spinner spinner(kLaneSpinNs);
  for (;;) {
    const uint32_t seen = lane_.bell();
    LaneResult result;
    const LaneClient::Poll poll = lane_.poll(seq, abi_now_ns(), &result);
    if (poll == LaneClient::Poll::kFailed) return -1;
    if (poll == LaneClient::Poll::kDone) {
      const double us = us_since(start_ns);
      lane_.release(result.buffer);
      return us;
    }
    // As a step's job is awaited: a sleep would count its own wake-up.
    if (spinner.spin()) continue;
    lane_.wait(seen, kBellNs);
    lane_.check_lease(abi_now_ns());
  }
}

bool DeviceLane::probe(LaneRates* rates, const std::function<void()>& busy) {
  probed_ = true;
  const AbiCtlHeader& words = region_.words();
  uint16_t* x = reinterpret_cast<uint16_t*>(region_.x(words.num_buffers - 1));
  std::fill(x, x + static_cast<size_t>(words.max_rows) * words.hidden, kHalfOne);
  LaneTimings timings;
  const uint64_t start_ns = abi_now_ns();
  for (uint32_t round = 0; round < kProbeRounds && us_since(start_ns) < kProbeBudgetUs; ++round) {
    // Beside jobs that take tens of milliseconds a wake-up is nothing, and there is no time for a second round.
    if (round == 1 && us_since(start_ns) < kProbeBudgetUs / 2) timings = LaneTimings();
    for (const ProbeJob job : kProbeJobs) {
      busy();
      const double us = time_job(job);
      if (us < 0) {
        look(abi_now_ns());
        return false;
      }
      timings.add({std::min(job.experts, timed_experts()), job.rows}, us);
    }
  }
  *rates = timings.rates({});
  end_series(abi_now_ns(), kFirstSeriesNs);
  series_pause_ns_ = kSeriesNs;
  return true;
}

void DeviceLane::end_series(uint64_t now_ns, uint64_t pause_ns) {
  series_ = LaneTimings();
  series_at_ = 0;
  next_series_ns_ = now_ns + pause_ns;
}

bool DeviceLane::take_sample(uint64_t now_ns) {
  if (sample_seq_ == 0) return true;
  LaneResult result;
  const LaneClient::Poll poll = lane_.poll(sample_seq_, now_ns, &result);
  if (poll == LaneClient::Poll::kPending) return false;
  sample_seq_ = 0;
  if (poll == LaneClient::Poll::kFailed) {
    look(now_ns);
    end_series(now_ns, series_pause_ns_);
    return true;
  }
  lane_.release(result.buffer);
  // By the server's clock, which is ours: it is not awaited, so it may have been answered long ago.
  const double us = static_cast<double>(result.done_ns - sampled_ns_) * 1e-3;
  const ProbeJob job = kSeries[std::min(series_at_, kSeriesLength - 1)];
  if (series_at_ >= kSeriesWarm) series_.add({std::min(job.experts, timed_experts()), job.rows}, us);
  ++series_at_;
  return true;
}

bool DeviceLane::sample(uint64_t now_ns, LaneRates* rates) {
  if (!take_sample(now_ns)) return false;
  if (series_at_ >= kSeriesLength) {
    const LaneRates before = *rates;
    *rates = series_.rates(before);
    const auto cost = [](const LaneRates& r) { return r.job_us + kProbeExperts * r.expert_us[0]; };
    const bool news = std::abs(cost(*rates) - cost(before)) > kNews * cost(before);
    series_pause_ns_ = news ? kSeriesNs : std::min(2 * series_pause_ns_, kLongestSeriesNs);
    end_series(now_ns, series_pause_ns_);
    ++counters_.samples;
    return true;
  }
  if (!up() || !probed_ || now_ns < next_series_ns_) return false;
  if (series_at_ == 0) {
    const bool in_use = recent_jobs_ >= kEnoughJobs;
    recent_jobs_ = 0;
    if (in_use) {
      // It tells its costs itself.
      series_pause_ns_ = kSeriesNs;
      end_series(now_ns, kSeriesNs);
      return false;
    }
  }
  sampled_ns_ = now_ns;
  sample_seq_ = submit_timed(kSeries[series_at_], now_ns);
  return false;
}

DeviceLane::Snapshot DeviceLane::snapshot() const {
  const bool left_alone = lane_.up() && !up();
  const DownReason reason = left_alone ? slow_reason_ : lane_.reason();
  return {up(), reason, left_alone ? slow_since_ns_ : lane_.since_ns(), lane_.counters(), counters_};
}

}  // namespace glm53
