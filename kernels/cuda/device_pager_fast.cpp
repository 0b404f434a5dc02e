// DevicePager's part for `fast`: the two halves of a step, and who computes which pick. The CPU lane's part is device_pager_lane.cpp.
#include <algorithm>

#include "cuda/device_driver.h"
#include "cuda/device_pager.h"
#include "tier/error.h"

namespace glm53 {
namespace {

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

void DevicePager::choose_by_force(bool lane) {
  FastParts& f = *fast_;
  for (FastParts::Entry& entry : f.entries) {
    entry.in_lane = lane && (f.placement == PAGER_ALL_LANE || (f.placement == PAGER_RANDOM && f.random() % 2 == 0));
    if (entry.in_lane) f.job.push_back(entry.picks);
  }
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
