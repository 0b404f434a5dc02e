// DevicePager's part for hints: device_hints.h says how.
#include <algorithm>
#include <thread>

#include "cuda/device_pager.h"
#include "tier/error.h"

namespace glm53 {
namespace {

constexpr uint64_t kLongestChunkNs = 5'000'000'000;

float score_of_first_touch(const PagerSpec& spec) {
  HeatTable heat(1, 1, {spec.slow_half_life, spec.fast_half_life, spec.fast_weight});
  heat.advance(0);
  heat.touch(0);
  return heat.score(0);
}

}  // namespace

HintParts::HintParts(const PagerSpec& spec, uint32_t ring)
    : given(ring), first_touch(score_of_first_touch(spec)), named_at(spec.experts_per_layer, 0), picked_at(spec.experts_per_layer, 0) {
  if (spec.hints == nullptr) throw Error(GLM53_INVALID, "hints: hint_records is not 0, and there is no memory for ids");
  if (spec.hint_chunk == 0) throw Error(GLM53_INVALID, "hint_chunk is 0");
}

// ---- the stepping thread --------------------------------------------------------------------------------------------------------------

void DevicePager::hint(uint32_t layer, uint32_t rows, uint64_t ids, uint32_t width, void* stream) {
  require(hints_ != nullptr, "hint: the pager was made without hint_records");
  require(layer < spec_.num_layers, "layer: out of range");
  require(rows >= 1 && rows <= spec_.max_rows, "rows: out of range");
  require(width >= 1 && width <= PAGER_HINT_WIDTH, "width: out of range");
  const bool open = fast_ != nullptr ? fast_->published && layer == fast_->layer + 1 : asked_ && layer == asked_layer_ + 1;
  require(open, "hint: not between the two halves of a step of the layer before");
  std::atomic<uint32_t>& given = hints_->given[enqueued_ % kRing];
  require(given.load(std::memory_order_relaxed) == 0, "hint: the step has one");
  given.store(rows << 8 | width, std::memory_order_release);
  int64_t* to = spec_.hints + static_cast<size_t>(layer) * spec_.max_rows * PAGER_HINT_WIDTH;
  const size_t bytes = static_cast<size_t>(rows) * width * sizeof(int64_t);
  const bool sent = driver_.copy_to_host(to, ids, bytes, stream) == 0 &&
                    driver_.write_word(stream, spec_.words_on_device + kHint * 4, static_cast<uint32_t>(enqueued_), kWriteDefault) == 0;
  if (!sent) refuse("the GPU driver refuses a hint: the device is lost, or has no stream memory operations");
}

// ---- the pager's thread ----------------------------------------------------------------------------------------------------------------

bool DevicePager::pump(uint64_t number) {
  if (hints_ == nullptr) return false;
  HintParts& h = *hints_;
  if (h.over == number || h.given[number % kRing].load(std::memory_order_acquire) == 0) return false;
  if (__atomic_load_n(&spec_.words[kHint], __ATOMIC_ACQUIRE) != static_cast<uint32_t>(number) || !landed(number)) return false;
  if (chunks_under_way() >= HintParts::kUnderWay) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (h.looked_at < number) look_at_hint(number);
  land_ahead(number + 1);
  if (!failed_.load(std::memory_order_acquire) && send_chunk(number)) return true;
  h.over = number;
  return false;
}

uint32_t DevicePager::chunks_under_way() const { return hints_->chunks - __atomic_load_n(&spec_.words[kHintLanded], __ATOMIC_ACQUIRE); }

bool DevicePager::landed(uint64_t number) const {
  return static_cast<int32_t>(__atomic_load_n(&spec_.words[kReply], __ATOMIC_ACQUIRE) - static_cast<uint32_t>(number)) >= 0;
}

void DevicePager::look_at_hint(uint64_t number) {
  HintParts& h = *hints_;
  const uint32_t layer = ring_[number % kRing].layer + 1, given = h.given[number % kRing].load(std::memory_order_acquire);
  const uint32_t rows = given >> 8, width = given & 0xff;
  const int64_t* ids = spec_.hints + static_cast<size_t>(layer) * spec_.max_rows * PAGER_HINT_WIDTH;
  h.looked_at = number;
  h.named.clear();
  h.next = 0;
  for (uint32_t i = 0; i < rows * width; ++i) {
    const int64_t id = ids[i % rows * width + i / rows];
    if (id < 0 || id >= static_cast<int64_t>(spec_.experts_per_layer) || h.named_at[static_cast<size_t>(id)] == number) continue;
    h.named_at[static_cast<size_t>(id)] = number;
    const uint32_t record = layer * spec_.experts_per_layer + static_cast<uint32_t>(id);
    if (const int32_t slot = slots_.resident(record); slot != SlotTable::kNone) {
      slots_.read(slot, number + 1);
      h.kept.push_back(slot);
    } else if (!slots_.landing(record)) {
      ++h.counters.hinted;
      // What its step would not give a slot gets none from a hint.
      if (h.named.size() < spec_.hint_records && heat_.touches(record) + 1 >= spec_.admit_after) h.named.push_back(record);
    }
  }
}

bool DevicePager::send_chunk(uint64_t number) {
  HintParts& h = *hints_;
  if (h.ahead.empty() || h.ahead.back().sent == spec_.record_stride) {
    if (h.next == h.named.size() || !begin_ahead(h.named[h.next++], number)) return false;
  }
  HintParts::Ahead& a = h.ahead.back();
  const uint64_t bytes = std::min<uint64_t>(spec_.hint_chunk, spec_.record_stride - a.sent);
  if (!send_part(a, bytes) ||
      !check(driver_.write_word(spec_.copy_stream, spec_.words_on_device + kHintLanded * 4, h.chunks + 1, kWriteDefault))) {
    give_up(a, number - 1);
    h.ahead.pop_back();
    return false;
  }
  a.chunk = ++h.chunks;
  a.sent += bytes;
  h.counters.bytes += bytes;
  return true;
}

bool DevicePager::begin_ahead(uint32_t record, uint64_t number) {
  HintParts& h = *hints_;
  int32_t slot = slots_.find_free(number - 1);
  if (slot == SlotTable::kNone) {
    slot = slots_.find_victim(heat_, number - 1);
    if (slot == SlotTable::kNone) return false;
    const auto old = static_cast<uint32_t>(slots_.record_in(static_cast<uint32_t>(slot)));
    if (spec_.admit_margin * heat_.score(old) >= h.first_touch) return false;
    slots_.evict(slot, number - 1);
    point_at_host(old);
    if (fast_ != nullptr) ++fast_->evictions;
  }
  slots_.begin_landing(slot, record, HintParts::kNoPassEnds);
  h.ahead.push_back({record, slot, 0, 0, false, false});
  ++h.counters.started;
  return true;
}

bool DevicePager::send_part(const HintParts::Ahead& a, uint64_t bytes) {
  const uint64_t to = in_slot(spec_.num_transit + static_cast<uint32_t>(a.slot)) + a.sent;
  const uint8_t* from = spec_.host + a.record * spec_.record_stride + a.sent;
  for (uint32_t i = 0; i < spec_.link_derate; ++i) {
    if (!check(driver_.copy_to_device(to, from, bytes, spec_.copy_stream))) return false;
  }
  return true;
}

void DevicePager::land_ahead(uint64_t pass) {
  const uint32_t word = __atomic_load_n(&spec_.words[kHintLanded], __ATOMIC_ACQUIRE);
  for (HintParts::Ahead& a : hints_->ahead) {
    if (a.landed || a.sent < spec_.record_stride || static_cast<int32_t>(word - a.chunk) < 0) continue;
    a.landed = true;
    settle_ahead(a, pass);
  }
}

void DevicePager::settle_ahead(const HintParts::Ahead& a, uint64_t pass) {
  slots_.land(a.slot, pass);
  point(a.record / spec_.experts_per_layer, a.record % spec_.experts_per_layer, in_slot(spec_.num_transit + static_cast<uint32_t>(a.slot)));
}

void DevicePager::give_up(const HintParts::Ahead& a, uint64_t pass) {
  slots_.abandon(a.slot, pass);
  hints_->counters.dropped += !a.counted;
}

void DevicePager::meet_hint(const Step& step, uint64_t pass) {
  HintParts& h = *hints_;
  h.looked_at = std::max(h.looked_at, pass - 1);
  h.named.clear();
  h.next = 0;
  for (const int32_t slot : h.kept) slots_.read(slot, pass - 1);
  h.kept.clear();
  const uint64_t chunk = std::min<uint64_t>(spec_.hint_chunk, spec_.record_stride);
  h.in_the_way = static_cast<double>(chunks_under_way() * chunk) / static_cast<double>(spec_.record_stride);
  if (h.ahead.empty()) return;
  land_ahead(pass - 1);
  const int64_t* picks = spec_.picks + static_cast<size_t>(step.layer) * spec_.max_rows * spec_.top_k;
  for (uint32_t i = 0; i < step.rows * spec_.top_k; ++i) {
    if (picks[i] >= 0 && picks[i] < static_cast<int64_t>(spec_.experts_per_layer)) h.picked_at[static_cast<size_t>(picks[i])] = pass;
  }
  size_t left = 0;
  for (HintParts::Ahead& a : h.ahead) {
    const bool picked = a.record / spec_.experts_per_layer == step.layer && h.picked_at[a.record % spec_.experts_per_layer] == pass;
    if (a.landed) {
      h.counters.used += picked && !a.counted;
      h.counters.dropped += !picked && !a.counted;
      slots_.read(a.slot, pass - 1);  // what picks it says so itself
    } else if (picked) {
      finish_ahead(a, pass);
    } else if (a.sent < spec_.record_stride) {
      give_up(a, pass - 1);
    } else {
      h.counters.dropped += !a.counted;
      a.counted = true;
      h.ahead[left++] = a;
    }
  }
  h.ahead.resize(left);
}

void DevicePager::finish_ahead(const HintParts::Ahead& a, uint64_t pass) {
  HintParts& h = *hints_;
  const uint64_t rest = spec_.record_stride - a.sent;
  if (rest > 0 && !send_part(a, rest)) {
    give_up(a, pass - 1);
    return;
  }
  counters_[kBytes] += rest;
  h.counters.late += !a.counted;
  h.in_the_way += static_cast<double>(rest) / static_cast<double>(spec_.record_stride);
  // The reply travels behind these bytes.
  sent_ = true;
  settle_ahead(a, pass);
}

// ---- any thread ------------------------------------------------------------------------------------------------------------------------

bool DevicePager::chunks_land() const {
  const uint64_t deadline_ns = abi_now_ns() + kLongestChunkNs;
  while (chunks_under_way() > 0) {
    if (abi_now_ns() > deadline_ns) return false;
    std::this_thread::yield();
  }
  return true;
}

void DevicePager::end_hints() {
  if (hints_ == nullptr) return;
  HintParts& h = *hints_;
  // A slot may lose its memory, or get other bytes, as soon as this returns.
  if (!chunks_land()) throw Error(GLM53_TIMEOUT, "a copy to the GPU that was begun ahead of a step does not end");
  land_ahead(enqueued_);
  for (const HintParts::Ahead& a : h.ahead) {
    if (!a.landed) {
      give_up(a, enqueued_);
      continue;
    }
    slots_.read(a.slot, enqueued_);
    h.counters.dropped += !a.counted;
  }
  for (const int32_t slot : h.kept) slots_.read(slot, enqueued_);
  h.kept.clear();
  h.ahead.clear();
  h.named.clear();
  h.next = 0;
  h.looked_at = enqueued_;
}

void DevicePager::hint_stats(uint64_t counters[6]) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const HintParts::Counters c = hints_ == nullptr ? HintParts::Counters{} : hints_->counters;
  const uint64_t values[6] = {c.hinted, c.started, c.used, c.late, c.dropped, c.bytes};
  std::copy(std::begin(values), std::end(values), counters);
}

}  // namespace glm53
