// DevicePager's part for `fast`: who computes which pick, the CPU lane's word, what was learned.
#include <algorithm>
#include <thread>

#include "cuda/device_driver.h"
#include "cuda/device_pager.h"
#include "tier/error.h"

namespace glm53 {
namespace {

constexpr uint64_t kLongestLandingNs = 20'000'000;  // copies that take longer are not timed
constexpr uint64_t kProbeCopyNs = 1'000'000'000;
constexpr double kProbeBacklogUs = 1000;  // copies that are under way when a job of the probe begins: about as long as it takes
constexpr uint32_t kProbeCopies = 4;
constexpr uint32_t kSleepAfter = 512;  // steps in a row without a use for the lane, those without misses too
constexpr uint32_t kWakeAfter = 4;     // steps in a row with one, those without misses left out

double us_between(uint64_t start_ns, uint64_t end_ns) { return static_cast<double>(end_ns - start_ns) * 1e-3; }

std::vector<double> layer_scales(const Arena& arena, uint32_t num_layers) {
  std::vector<double> scales;
  for (uint32_t layer = 0; layer < num_layers; ++layer) {
    scales.push_back(static_cast<double>(arena.shape(layer).record_bytes) / arena.shape(0).record_bytes);
  }
  return scales;
}

void require_arena(const PagerSpec& spec, const Arena& arena) {
  if (arena.header().num_layers != spec.num_layers || arena.header().experts_per_layer != spec.experts_per_layer) {
    throw Error(GLM53_INVALID, format("the arena has %u x %u records, the pager is for %u x %u", arena.header().num_layers,
                                      arena.header().experts_per_layer, spec.num_layers, spec.experts_per_layer));
  }
  if (arena.record(0) != spec.host || arena.header().record_stride != spec.record_stride) {
    throw Error(GLM53_INVALID, "host: not the arena's records");
  }
}

}  // namespace

FastParts::FastParts(const PagerSpec& pager, const PagerFast& fast, const Arena& home, Region* region)
    : spec(fast),
      experts(fast.experts, fast.experts + pager.num_layers),
      arena(home),
      lane(region == nullptr ? nullptr : std::make_unique<DeviceLane>(pager, fast, home, *region)),
      hidden(home.shape(0).hidden),
      costs(layer_scales(home, pager.num_layers), fast.kernel_a_us, fast.kernel_b_us, fast.link_us,
            {fast.ct_a_us, fast.ct_b_us, fast.ct_tzc_us}),
      forecast(pager.num_layers),
      stats(pager.num_layers),
      dirty(pager.num_layers, true),
      masked(pager.num_layers),
      entry_of(pager.experts_per_layer, 0) {
  require_arena(pager, home);
}

// ---- the stepping thread --------------------------------------------------------------------------------------------------------------

void DevicePager::publish(uint32_t layer, uint32_t rows, uint64_t selected, uint64_t x, void* stream) {
  require(fast_ != nullptr, "publish: the pager was not made for fast");
  FastParts& f = *fast_;
  // What the lane may not want stays on the device: without activations the step has no job and no second wait.
  const bool with_x = lane_up() && f.lane_wanted.load(std::memory_order_acquire);
  const uint64_t number = enter(layer, rows, with_x);
  MoeCudaPublish p{};
  p.selected = reinterpret_cast<const void*>(selected);
  p.selected_to = reinterpret_cast<void*>(f.spec.picks_on_device + static_cast<uint64_t>(layer) * spec_.max_rows * spec_.top_k * 8);
  if (with_x) {
    p.x = reinterpret_cast<const void*>(x);
    p.x_to = reinterpret_cast<void*>(f.lane->x_on_device(number));
  }
  p.arrivals = reinterpret_cast<uint32_t*>(f.spec.arrivals);
  p.word = reinterpret_cast<uint32_t*>(spec_.words_on_device + kRequest * 4);
  p.value = static_cast<uint32_t>(number);
  p.hidden = f.hidden;
  p.rows = rows;
  p.top_k = spec_.top_k;
  f.published = true;
  f.with_x = with_x;
  f.layer = layer;
  f.rows = rows;
  f.selected = selected;
  f.x = x;
  if (f.spec.publish(&p, stream) != 0) refuse("the device refuses to publish a step");
}

void DevicePager::finish(uint32_t layer, uint32_t rows, uint64_t weights, uint64_t shared, uint64_t out, void* stream) {
  require(fast_ != nullptr && fast_->published && fast_->layer == layer && fast_->rows == rows, "finish: no such step was published");
  FastParts& f = *fast_;
  f.published = false;
  const uint32_t value = static_cast<uint32_t>(enqueued_);
  MoeCudaStep step{};
  step.records = reinterpret_cast<const uint64_t*>(f.spec.records) + static_cast<size_t>(layer) * spec_.experts_per_layer;
  step.x = reinterpret_cast<const void*>(f.x);
  step.selected = reinterpret_cast<const void*>(f.selected);
  step.weights = reinterpret_cast<const void*>(weights);
  step.num_experts = spec_.experts_per_layer;
  step.rows = rows;
  step.top_k = spec_.top_k;
  step.x_dtype = MOE_DTYPE_F16;
  step.selected_type = MOE_CUDA_INDEX_I64;
  step.weights_dtype = MOE_DTYPE_F16;
  bool sent = driver_.wait_word(stream, spec_.words_on_device + kReply * 4, value, kWaitGreaterEqual) == 0;
  if (!f.with_x) {
    step.out = reinterpret_cast<float*>(out);
    step.shared = reinterpret_cast<const float*>(shared);
    step.flags = MOE_CUDA_ALL_HERE;  // without activations the step has no job of the lane
    sent = sent && f.spec.run(f.experts[layer], &step, stream) == 0;
  } else {
    step.y = reinterpret_cast<float*>(f.spec.y);
    MoeCudaCombine sum{};
    sum.records = step.records;
    sum.selected = step.selected;
    sum.weights = step.weights;
    sum.y = step.y;
    sum.other_from = reinterpret_cast<const uint64_t*>(f.spec.rows_at_on_device);
    sum.shared = reinterpret_cast<const float*>(shared);
    sum.out = reinterpret_cast<float*>(out);
    sum.hidden = f.hidden;
    sum.num_experts = step.num_experts;
    sum.rows = rows;
    sum.top_k = step.top_k;
    sum.selected_type = step.selected_type;
    sum.weights_dtype = step.weights_dtype;
    sent = sent && f.spec.run(f.experts[layer], &step, stream) == 0 &&
           driver_.wait_word(stream, spec_.words_on_device + kLaneReply * 4, value, kWaitGreaterEqual) == 0 &&
           f.spec.combine(&sum, stream) == 0;
  }
  if (!sent) refuse("the device refuses the second half of a step");
}

// ---- the pager's thread ----------------------------------------------------------------------------------------------------------------

void DevicePager::answer_fast(uint64_t number, const Step& step) {
  FastParts& f = *fast_;
  const uint64_t seen_ns = abi_now_ns();
  uint64_t replied_ns = 0;
  uint32_t copies = 0;
  bool job = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sent_ = false;
    if (f.lane != nullptr && f.lane->begin(seen_ns) && f.lane->needs_probe()) probe_lane();
    group(step, number);
    const bool lane = step.with_x && lane_up();
    const double predicted_us = choose_by_cost(step, number, lane);
    if (f.placement == PAGER_BY_COST || f.placement == PAGER_NEVER_LANE) {
      f.forecast.saw_request(step.layer, step.rows, seen_ns, predicted_us);
    } else {
      choose_by_force(lane);
    }
    job = start_job(step, number);
    if (!job) raise_lane_reply(number, 0);
    fetch(step, number);
    if (f.dirty[step.layer]) send_records(step.layer);
    // A landing that queued behind bytes of a hint says nothing about the link.
    copies = hints_ != nullptr && hints_->in_the_way > 0 ? 0 : copies_;
    replied_ns = abi_now_ns();
    reply(number);
    f.stats.plan_us += us_between(seen_ns, abi_now_ns());
    if (f.lane != nullptr) f.lane_seen = f.lane->snapshot();
  }
  follow(number, step.layer, copies, job, replied_ns);
}

void DevicePager::group(const Step& step, uint64_t pass) {
  FastParts& f = *fast_;
  const uint32_t layer = step.layer, first = layer * spec_.experts_per_layer, total = step.rows * spec_.top_k;
  const int64_t* picks = spec_.picks + static_cast<size_t>(layer) * spec_.max_rows * spec_.top_k;
  const auto valid = [&](int64_t expert) { return expert >= 0 && expert < static_cast<int64_t>(spec_.experts_per_layer); };
  start_step(step, pass);
  unmask(layer);
  if (f.placement == PAGER_RANDOM) evict_at_random(pass);
  f.entries.clear();
  for (uint32_t i = 0; i < total; ++i) {
    if (!valid(picks[i])) continue;
    const auto expert = static_cast<uint32_t>(picks[i]);
    if (seen_[expert] != pass) {
      seen_[expert] = pass;
      heat_.touch(first + expert);
      f.entry_of[expert] = static_cast<uint32_t>(f.entries.size());
      const int32_t slot = slots_.resident(first + expert);
      if (slot != SlotTable::kNone) slots_.read(slot, pass);
      f.entries.push_back({{expert, 0, 0}, slot, heat_.score(first + expert), false});
    }
    ++f.entries[f.entry_of[expert]].picks.count;
    ++counters_[kPicks];
  }
  uint32_t at = 0;
  for (FastParts::Entry& entry : f.entries) {
    entry.picks.first = at;
    at += entry.picks.count;
    entry.picks.count = 0;
  }
  f.picks.resize(at);
  for (uint32_t i = 0; i < total; ++i) {
    if (!valid(picks[i])) continue;
    LaneExpert& entry = f.entries[f.entry_of[static_cast<size_t>(picks[i])]].picks;
    f.picks[entry.first + entry.count++] = i;
  }
  f.stats.masked_picks += total - at;
}

double DevicePager::choose_by_cost(const Step& step, uint64_t pass, bool lane) {
  FastParts& f = *fast_;
  f.order.clear();
  f.job.clear();
  for (uint32_t i = 0; i < f.entries.size(); ++i) {
    if (f.entries[i].slot == SlotTable::kNone) f.order.push_back(i);
  }
  std::sort(f.order.begin(), f.order.end(), [&](uint32_t a, uint32_t b) {
    const FastParts::Entry &x = f.entries[a], &y = f.entries[b];
    return x.heat != y.heat ? x.heat < y.heat : x.picks.expert > y.picks.expert;
  });
  f.misses.clear();
  for (const uint32_t i : f.order) f.misses.push_back({f.entries[i].picks.count});
  const auto total = static_cast<uint32_t>(f.order.size());
  const auto hits = static_cast<uint32_t>(f.entries.size()) - total;
  const double ahead = hints_ != nullptr ? hints_->in_the_way : 0;
  uint32_t chosen = 0;
  if (lane_up() && f.placement == PAGER_BY_COST) {
    chosen = f.costs.choose(step.layer, hits, f.misses, total, ahead);
    // A record that is worth a slot comes now, or the cache would never learn from a lane that is quicker than the link.
    if (chosen == total && total > 0) {
      const FastParts::Entry& hottest = f.entries[f.order.back()];
      chosen -= find_place(step.layer * spec_.experts_per_layer + hottest.picks.expert, hottest.heat, pass).earned;
    }
    note_choice(total, chosen);
  }
  if (!lane) chosen = 0;
  for (uint32_t i = 0; i < chosen; ++i) {
    f.entries[f.order[i]].in_lane = true;
    f.job.push_back(f.entries[f.order[i]].picks);
  }
  const uint32_t left = total - chosen;
  return std::max(f.costs.device_us(hits + left, left, ahead), f.costs.lane_us(step.layer, f.misses.data(), chosen));
}

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

void DevicePager::choose_by_force(bool lane) {
  FastParts& f = *fast_;
  for (FastParts::Entry& entry : f.entries) {
    entry.in_lane = lane && (f.placement == PAGER_ALL_LANE || (f.placement == PAGER_RANDOM && f.random() % 2 == 0));
    if (entry.in_lane) f.job.push_back(entry.picks);
  }
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

void DevicePager::fetch(const Step& step, uint64_t pass) {
  FastParts& f = *fast_;
  auto& by_lane = f.stats.picks[step.layer];
  const auto count = [&](Lane lane, uint32_t picks) {
    by_lane[static_cast<size_t>(lane)] += picks;
    ++f.stats.experts[static_cast<size_t>(lane)];
  };
  for (const FastParts::Entry& entry : f.entries) {
    if (entry.in_lane) {
      count(Lane::kCpu, entry.picks.count);
      counters_[kMissed] += entry.slot == SlotTable::kNone;
    } else if (entry.slot != SlotTable::kNone) {
      count(Lane::kHit, entry.picks.count);
      counters_[kHits] += entry.picks.count;
    }
  }
  // Hottest first.
  const bool admits = f.placement != PAGER_ALL_IN_PLACE;
  weigh_visitors();
  for (auto i = f.order.rbegin(); i != f.order.rend(); ++i) {
    FastParts::Entry& entry = f.entries[*i];
    if (entry.in_lane) continue;
    const Miss miss{entry.picks.expert, entry.heat};
    if (admits) keep_visitors(&miss, pass);
    if (!admits || (f.placement == PAGER_RANDOM && f.random() % 3 == 0)) {
      ++counters_[kMissed];
      ++counters_[kInPlace];
    } else {
      entry.lane = bring(step.layer, miss, pass);
    }
  }
  if (admits) keep_visitors(nullptr, pass);
  launch_gather(step.layer, pass);
  for (const uint32_t i : f.order) {
    const FastParts::Entry& entry = f.entries[i];
    if (entry.in_lane) continue;
    count(entry.lane, entry.picks.count);
    if (entry.lane == Lane::kZeroCopy) f.stats.bytes_in_place += f.arena.shape(step.layer).record_bytes;
  }
}

void DevicePager::evict_at_random(uint64_t pass) {
  if (slots_.size() == 0 || fast_->random() % 3 != 0) return;
  const auto slot = static_cast<uint32_t>(fast_->random() % slots_.size());
  const int32_t record = slots_.record_in(slot);
  if (record == SlotTable::kNone || !slots_.evict(static_cast<int32_t>(slot), pass - 1)) return;
  point_at_host(static_cast<uint32_t>(record));
  ++fast_->evictions;
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

// ---- tables ----------------------------------------------------------------------------------------------------------------------------

void DevicePager::set_record(uint32_t layer, uint32_t expert, uint64_t address) {
  fast_->spec.records_mirror[static_cast<size_t>(layer) * spec_.experts_per_layer + expert] = address;
  fast_->dirty[layer] = true;
}

void DevicePager::unmask(uint32_t layer) {
  for (const uint32_t expert : fast_->masked[layer]) {
    const uint32_t record = layer * spec_.experts_per_layer + expert;
    const int32_t slot = slots_.resident(record);
    set_record(layer, expert, slot == SlotTable::kNone ? on_host(record) : in_slot(spec_.num_transit + static_cast<uint32_t>(slot)));
  }
  fast_->masked[layer].clear();
}

void DevicePager::send_records(uint32_t layer) {
  const size_t first = static_cast<size_t>(layer) * spec_.experts_per_layer;
  const size_t bytes = spec_.experts_per_layer * sizeof(uint64_t);
  if (!check(driver_.copy_to_device(fast_->spec.records + first * sizeof(uint64_t), fast_->spec.records_mirror + first, bytes,
                                    spec_.copy_stream))) {
    return;
  }
  sent_ = true;
  fast_->dirty[layer] = false;
}

// ---- any thread ------------------------------------------------------------------------------------------------------------------------

void DevicePager::force(uint32_t placement, uint64_t seed) {
  require(fast_ != nullptr, "force: the pager was not made for fast");
  require(placement <= PAGER_RANDOM, "placement: not known");
  const std::lock_guard<std::mutex> lock(mutex_);
  fast_->placement = placement;
  fast_->random.seed(seed);
  fast_->unused = fast_->useful = 0;
  fast_->lane_wanted.store(true, std::memory_order_release);
}

std::string DevicePager::fast_stats() {
  require(fast_ != nullptr, "the pager was not made for fast");
  const std::lock_guard<std::mutex> lock(mutex_);
  const FastParts& f = *fast_;
  const TierStats& t = f.stats;
  const DeviceLane::Snapshot& lane = f.lane_seen;
  std::array<uint64_t, kNumLanes> by_lane{};
  std::string by_layer;
  for (const auto& layer : t.picks) {
    for (uint32_t i = 0; i < kNumLanes; ++i) by_lane[i] += layer[i];
    by_layer += (by_layer.empty() ? "[" : ", ") + lane_counts_json(layer);
  }
  JsonObject state;
  state.add("state", std::string(f.lane == nullptr ? "OFF" : lane.up ? "UP" : "DOWN"));
  state.add("reason", std::string(f.lane == nullptr ? "there is no control region" : down_reason_name(lane.reason)));
  state.add("for_s", lane.since_ns == 0 ? 0.0 : us_between(lane.since_ns, abi_now_ns()) * 1e-6);
  state.add("wanted", uint64_t{f.lane_wanted.load(std::memory_order_acquire)});
  state.add("ups", lane.lane.ups).add("aborts", lane.lane.aborts).add("jobs", lane.lane.submitted).add("done", lane.lane.done);
  state.add("samples", lane.counters.samples).add("refused", lane.lane.refused).add("full", lane.lane.full + t.lane_full);
  JsonObject o;
  o.add_raw("lane", state.text()).add_raw("picks", lane_counts_json(by_lane)).add_raw("experts", lane_counts_json(t.experts));
  o.add_raw("picks_by_layer", by_layer + "]").add("evictions", f.evictions).add("masked_picks", t.masked_picks);
  o.add("bytes_in_place", t.bytes_in_place);
  o.add("cpu_lane_bytes", lane.counters.bytes).add("cpu_expert_bytes", lane.counters.bytes).add("aborts", lane.lane.aborts);
  o.add("recomputed_picks", lane.counters.recomputed_picks).add("recomputed_steps", lane.counters.recomputed_steps);
  o.add("plan_us", t.plan_us).add("lane_us", t.lane_us).add("overrun_us", t.overrun_us);
  o.add("ct_a_us", f.costs.job_us()).add("ct_b_us", f.costs.expert_us(1)).add("ct_tzc_us", f.costs.link_us());
  o.add("planner_steps", f.forecast.steps()).add("planner_error_pct", f.forecast.median_error_pct());
  return o.text();
}

}  // namespace glm53
