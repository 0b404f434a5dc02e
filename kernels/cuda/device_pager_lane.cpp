// DevicePager's part for the CPU lane of `fast`: its jobs and its word, whether it is wanted, what it and the link cost.
#include <algorithm>
#include <thread>

#include "cuda/device_driver.h"
#include "cuda/device_pager.h"

namespace glm53 {
namespace {

constexpr uint64_t kLongestLandingNs = 20'000'000;  // copies that take longer are not timed
constexpr uint64_t kProbeCopyNs = 1'000'000'000;
constexpr double kProbeBacklogUs = 1000;  // copies that are under way when a job of the probe begins: about as long as it takes
constexpr uint32_t kProbeCopies = 4;
constexpr uint32_t kSleepAfter = 512;  // steps in a row without a use for the lane, those without misses too
constexpr uint32_t kWakeAfter = 4;     // steps in a row with one, those without misses left out

}  // namespace

void DevicePager::note_choice(uint32_t misses, uint32_t chosen) {
  FastParts& f = *fast_;
  f.unused = chosen > 0 ? 0 : f.unused + 1;
  // A step that misses nothing does not use the lane, but says nothing of what the next miss will make of it.
  if (misses > 0) f.useful = chosen > 0 ? f.useful + 1 : 0;
  if (f.unused >= kSleepAfter) {
    f.useful = 0;  // uses so long ago wake nobody
    f.lane_wanted.store(false, std::memory_order_release);
  }
  if (f.useful >= kWakeAfter) f.lane_wanted.store(true, std::memory_order_release);
}

bool DevicePager::start_job(const Step& step, uint64_t number) {
  FastParts& f = *fast_;
  if (f.job.empty()) return false;
  if (!f.lane->submit(number, step.layer, step.rows, f.job, f.picks)) {
    // Nothing was started: the device takes these picks itself.
    ++f.stats.lane_full;
    f.job.clear();
    for (FastParts::Entry& entry : f.entries) entry.in_lane = false;
    return false;
  }
  f.job_rows.clear();
  for (const LaneExpert& e : f.job) {
    set_record(step.layer, e.expert, 0);
    f.masked[step.layer].push_back(e.expert);
    f.job_rows.push_back({e.count});
  }
  return true;
}

void DevicePager::follow(uint64_t number, uint32_t layer, uint32_t copies, bool job, uint64_t replied_ns) {
  FastParts& f = *fast_;
  bool waiting = job, timing = copies > 0, served = false;
  uint64_t landed_ns = 0, answered_ns = 0;
  Spinner spinner(kLaneSpinNs);
  while (waiting || timing) {
    const uint64_t now_ns = abi_now_ns();
    if (timing) {
      if (landed(number)) {
        landed_ns = now_ns;
        timing = false;
      } else if (now_ns > replied_ns + kLongestLandingNs || stop_.load(std::memory_order_acquire)) {
        timing = false;
      }
    }
    const bool pumping = pump(number);
    if (!waiting) {
      if (timing) std::this_thread::yield();
      continue;
    }
    DeviceLane::Answer answer = DeviceLane::Answer::kComputedHere;
    uint64_t rows_at = f.spec.own_rows_on_device;
    try {
      answer = f.lane->poll(now_ns);
      rows_at = f.lane->rows_on_device();
    } catch (const std::exception&) {
      // The device must go on all the same; the next look at the counters says that the step is worth nothing.
      check(-1);
    }
    if (answer != DeviceLane::Answer::kPending) {
      raise_lane_reply(number, rows_at);
      answered_ns = now_ns;
      served = answer == DeviceLane::Answer::kServed;
      waiting = false;
    } else if (!pumping && !spinner.spin()) {
      timing = false;  // a landing that is slept through is not timed
      f.lane->wait_for_bell();
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (landed_ns != 0) f.costs.saw_copies(copies, us_between(replied_ns, landed_ns));
  if (served) {
    f.costs.saw_job(layer, f.job_rows.data(), static_cast<uint32_t>(f.job_rows.size()), f.lane->job_us());
    f.stats.lane_us += f.lane->job_us();
  }
  if (landed_ns != 0 && answered_ns > landed_ns) f.stats.overrun_us += us_between(landed_ns, answered_ns);
  if (job) {
    f.lane_seen = f.lane->snapshot();
  } else {
    sample_lane();
  }
}

void DevicePager::raise_lane_reply(uint64_t number, uint64_t rows_at) {
  // The address first: who sees the word sees it.
  __atomic_store_n(fast_->spec.rows_at, rows_at, __ATOMIC_RELEASE);
  __atomic_store_n(&spec_.words[kLaneReply], static_cast<uint32_t>(number), __ATOMIC_RELEASE);
}

void DevicePager::look_at_lane() {
  FastParts& f = *fast_;
  if (f.lane == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  f.lane->watch(abi_now_ns());
  f.lane_seen = f.lane->snapshot();
}

void DevicePager::probe_lane() {
  FastParts& f = *fast_;
  if (spec_.num_transit > 0) {
    if (const double us = time_link(); us > 0) f.costs.set_link(us);
  }
  // The link is busy all the time, but what is under way stays short: this step's own records queue behind it.
  const uint64_t start_ns = abi_now_ns();
  double busy_until_us = 0;
  const auto busy = [&] {
    if (spec_.num_transit == 0) return;
    const double now_us = us_between(start_ns, abi_now_ns());
    for (busy_until_us = std::max(busy_until_us, now_us); busy_until_us < now_us + kProbeBacklogUs; busy_until_us += f.costs.link_us()) {
      if (!check(driver_.copy_to_device(in_slot(0), spec_.host, spec_.record_stride, spec_.copy_stream))) return;
    }
  };
  LaneRates rates;
  if (!f.lane->probe(&rates, busy)) return;
  f.costs.set_lane(rates);
  f.unused = f.useful = 0;
  f.lane_wanted.store(true, std::memory_order_release);
}

void DevicePager::sample_lane() {
  FastParts& f = *fast_;
  if (f.lane == nullptr || !f.costs.lane_known() || !f.costs.lane_measured()) return;
  LaneRates rates = f.costs.lane();
  if (f.lane->sample(abi_now_ns(), &rates)) f.costs.set_lane(rates);
}

double DevicePager::time_link() {
  // Nobody reads a transit slot now: the steps before are over, and this one's records are not there yet.
  const uint32_t value = ++fast_->links_timed;
  const uint64_t start_ns = abi_now_ns();
  std::array<MoeCudaCopy, kProbeCopies> copies;
  for (uint32_t i = 0; i < kProbeCopies; ++i) copies[i] = {in_slot(0), on_host(i % (spec_.num_layers * spec_.experts_per_layer))};
  if (!move(copies.data(), kProbeCopies)) return 0;
  if (!check(driver_.write_word(spec_.copy_stream, spec_.words_on_device + kScratch * 4, value, kWriteDefault))) return 0;
  while (__atomic_load_n(&spec_.words[kScratch], __ATOMIC_ACQUIRE) != value) {
    if (abi_now_ns() > start_ns + kProbeCopyNs) return 0;
    std::this_thread::yield();
  }
  return us_between(start_ns, abi_now_ns()) / kProbeCopies * spec_.link_derate;
}

}  // namespace glm53
