// DevicePager's part for hints: device_hints.h says how.
#include <algorithm>
#include <thread>

#include "cuda/device_pager.h"
#include "tier/error.h"

namespace glm53 {
namespace {

constexpr uint64_t kLongestChunkNs = 5'000'000'000;

}  // namespace

HintParts::HintParts(const PagerSpec& spec, uint32_t ring)
    : given(ring), named_at(spec.experts_per_layer, 0), picked_at(spec.experts_per_layer, 0) {
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
    // What is in a slot stays there: nothing is driven out before the next step has seen its picks.
    if (slots_.resident(record) != SlotTable::kNone) continue;
    ++h.counters.hinted;
    if (h.named.size() < spec_.hint_records) h.named.push_back(record);
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
  const int32_t slot = slots_.find_reserved(number - 1);
  if (slot == SlotTable::kNone) return false;
  slots_.begin_landing(slot, record, HintParts::kNoPassEnds);
  h.ahead.push_back({record, slot, 0, 0});
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

void DevicePager::give_up(const HintParts::Ahead& a, uint64_t pass) {
  slots_.abandon(a.slot, pass);
  ++hints_->counters.dropped;
}

void DevicePager::meet_hint(const Step& step, uint64_t pass) {
  HintParts& h = *hints_;
  h.looked_at = std::max(h.looked_at, pass - 1);
  h.named.clear();
  h.next = 0;
  const uint64_t chunk = std::min<uint64_t>(spec_.hint_chunk, spec_.record_stride);
  h.in_the_way = static_cast<double>(chunks_under_way() * chunk) / static_cast<double>(spec_.record_stride);
  if (h.ahead.empty()) return;
  const int64_t* picks = spec_.picks + static_cast<size_t>(step.layer) * spec_.max_rows * spec_.top_k;
  for (uint32_t i = 0; i < step.rows * spec_.top_k; ++i) {
    if (picks[i] >= 0 && picks[i] < static_cast<int64_t>(spec_.experts_per_layer)) h.picked_at[static_cast<size_t>(picks[i])] = pass;
  }
  const uint32_t word = __atomic_load_n(&spec_.words[kHintLanded], __ATOMIC_ACQUIRE);
  for (const HintParts::Ahead& a : h.ahead) {
    const uint32_t layer = a.record / spec_.experts_per_layer, expert = a.record % spec_.experts_per_layer;
    if (layer != step.layer || h.picked_at[expert] != pass) {
      give_up(a, pass - 1);
      continue;
    }
    if (a.sent == spec_.record_stride && static_cast<int32_t>(word - a.chunk) >= 0) {
      ++h.counters.used;
    } else if (!finish_ahead(a, pass)) {
      continue;
    }
    slots_.land(a.slot, pass);
    point(layer, expert, in_slot(spec_.num_transit + static_cast<uint32_t>(a.slot)));
    h.visitors.push_back({a.record, a.slot, 0});
  }
  h.ahead.clear();
}

bool DevicePager::finish_ahead(const HintParts::Ahead& a, uint64_t pass) {
  HintParts& h = *hints_;
  const uint64_t rest = spec_.record_stride - a.sent;
  if (rest > 0 && !send_part(a, rest)) {
    give_up(a, pass - 1);
    return false;
  }
  counters_[kBytes] += rest;
  ++h.counters.late;
  h.in_the_way += static_cast<double>(rest) / static_cast<double>(spec_.record_stride);
  // The reply travels behind these bytes.
  sent_ = true;
  return true;
}

void DevicePager::weigh_visitors() {
  if (hints_ == nullptr) return;
  std::vector<HintParts::Visitor>& visitors = hints_->visitors;
  for (HintParts::Visitor& v : visitors) v.heat = heat_.score(v.record);
  std::sort(visitors.begin(), visitors.end(), [](const HintParts::Visitor& a, const HintParts::Visitor& b) {
    return a.heat != b.heat ? a.heat > b.heat : a.record < b.record;
  });
  hints_->asked = 0;
}

void DevicePager::keep_visitors(const Miss* until, uint64_t pass) {
  if (hints_ == nullptr) return;
  HintParts& h = *hints_;
  for (; h.asked < h.visitors.size(); ++h.asked) {
    HintParts::Visitor& v = h.visitors[h.asked];
    const uint32_t expert = v.record % spec_.experts_per_layer;
    if (until != nullptr && (v.heat != until->heat ? v.heat < until->heat : expert > until->expert)) return;
    const Place found = find_place(v.record, v.heat, pass);
    if (found.slot == SlotTable::kNone || !found.earned) continue;
    drive_out(found.slot, pass - 1);
    slots_.reserve(found.slot);
    slots_.release(v.slot);
    v.slot = SlotTable::kNone;
  }
}

void DevicePager::end_visits(uint64_t passes_done) {
  for (const HintParts::Visitor& v : hints_->visitors) {
    if (v.slot == SlotTable::kNone) continue;
    slots_.evict(v.slot, passes_done);
    point_at_host(v.record);
  }
  hints_->visitors.clear();
}

uint32_t DevicePager::pool_size() const {
  if (hints_ == nullptr) return 0;
  const uint32_t most = (usable_ - spec_.num_transit) / HintParts::kShare;
  return static_cast<uint32_t>(std::min<uint64_t>(uint64_t{HintParts::kPerRecord} * spec_.hint_records, most));
}

void DevicePager::fill_pool(uint64_t passes_done) {
  while (slots_.pool().size() < pool_size()) {
    int32_t slot = slots_.find_free(passes_done);
    if (slot == SlotTable::kNone) slot = slots_.find_victim(heat_, passes_done);
    if (slot == SlotTable::kNone) return;
    drive_out(slot, passes_done);
    slots_.reserve(slot);
  }
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
  for (const HintParts::Ahead& a : h.ahead) give_up(a, enqueued_);
  end_visits(enqueued_);
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
