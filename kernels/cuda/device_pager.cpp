#include "cuda/device_pager.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "cuda/device_driver.h"
#include "tier/error.h"

namespace glm53 {
namespace {

constexpr uint64_t kNoPass = ~UINT64_C(0);
constexpr uint64_t kNeverOver = ~UINT64_C(0);
constexpr int64_t kSpinNs = 2'000'000;  // after a step
constexpr uint64_t kIdleNs = 50'000'000;
constexpr uint64_t kBehindNs = 45'000'000'000;  // how long a step may take that the host waits for: many, and a prefill before them
constexpr int64_t kCatchUpSpinNs = 20'000;
constexpr auto kCatchUpSleep = std::chrono::microseconds(50);
constexpr uint64_t kStopNs = 5'000'000'000;  // how long a stop waits for a device that was told to ask

}  // namespace

void DevicePager::require(bool holds, const char* problem) {
  if (!holds) throw Error(GLM53_INVALID, problem);
}

DevicePager::DevicePager(const PagerSpec& spec, std::unique_ptr<FastParts> fast)
    : spec_(spec),
      driver_(spec.driver != nullptr ? *spec.driver : cuda_driver()),
      hints_(spec.hint_records == 0 ? nullptr : std::make_unique<HintParts>(spec, kRing)),
      heat_(spec.num_layers, spec.experts_per_layer, {spec.slow_half_life, spec.fast_half_life, spec.fast_weight, spec.forget_below}),
      slots_(spec.num_slots - std::min(spec.num_transit, spec.num_slots), spec.num_layers * spec.experts_per_layer),
      dirty_(spec.num_layers, true),
      in_transit_(spec.num_layers),
      seen_(spec.experts_per_layer, 0),
      usable_(spec.num_slots),
      fast_(std::move(fast)) {
  require(spec.num_layers > 0 && spec.experts_per_layer > 0 && spec.num_parts > 0 && spec.max_rows > 0 && spec.top_k > 0, "a size is 0");
  require(spec.num_layers < kRing, "too many layers");
  require(spec.link_derate > 0, "link_derate is 0: 1 leaves the link as it is");
  require(spec.num_transit <= spec.num_slots, "more transit slots than slots");
  offsets_.assign(spec.offsets, spec.offsets + static_cast<size_t>(spec.num_layers) * spec.num_parts);
  for (uint32_t record = 0; record < spec.num_layers * spec.experts_per_layer; ++record) point_at_host(record);
  if (driver_.context_get(&context_) != 0) throw Error(GLM53_SYSTEM, "the thread has no CUDA context");
  thread_ = std::thread([this] { run(); });
}

DevicePager::~DevicePager() {
  stop_.store(true, std::memory_order_release);
  armed_.nudge();
  thread_.join();
  // Who closes the pager may free the slots.
  if (hints_ != nullptr) chunks_land();
}

uint64_t DevicePager::enter(uint32_t layer, uint32_t rows, bool with_x) {
  require(layer < spec_.num_layers, "layer: out of range");
  require(rows >= 1 && rows <= spec_.max_rows, "rows: out of range");
  catch_up(kMostAhead - 1, kBehindNs);
  const uint64_t number = ++enqueued_;
  ring_[number % kRing] = {layer, rows, with_x};
  if (hints_ != nullptr) hints_->given[number % kRing].store(0, std::memory_order_relaxed);
  // Armed before the device is told: if enqueuing breaks half way the thread must not sleep through what was enqueued.
  armed_.post(number);
  return number;
}

void DevicePager::catch_up(uint32_t most, uint64_t timeout_ns) {
  const auto behind = [&] { return enqueued_ - served_.load(std::memory_order_acquire); };
  if (behind() <= most) return;
  const uint64_t deadline_ns = abi_now_ns() + timeout_ns;
  Spinner spinner(kCatchUpSpinNs);
  while (behind() > most) {
    if (spinner.spin()) continue;
    if (abi_now_ns() > deadline_ns) {
      throw Error(GLM53_TIMEOUT,
                  format("the device did not come to a decode step within %llu ms: %llu layers are unanswered",
                         static_cast<unsigned long long>(timeout_ns / 1'000'000), static_cast<unsigned long long>(behind())));
    }
    std::this_thread::sleep_for(kCatchUpSleep);
  }
}

void DevicePager::refuse(const char* what) {
  failed_.store(true, std::memory_order_release);
  throw Error(GLM53_SYSTEM, what);
}

void DevicePager::step(uint32_t layer, uint32_t rows, uint64_t selected, void* stream) {
  ask(layer, rows, selected, stream);
  wait(stream);
}

void DevicePager::ask(uint32_t layer, uint32_t rows, uint64_t selected, void* stream) {
  require(fast_ == nullptr, "step: the pager was made for fast");
  const uint32_t value = static_cast<uint32_t>(enter(layer, rows, false));
  const size_t stride = static_cast<size_t>(spec_.max_rows) * spec_.top_k;
  const size_t bytes = static_cast<size_t>(rows) * spec_.top_k * sizeof(int64_t);
  const bool sent = driver_.copy_to_host(spec_.picks + layer * stride, selected, bytes, stream) == 0 &&
                    driver_.write_word(stream, spec_.words_on_device + kRequest * 4, value, kWriteDefault) == 0;
  if (!sent) refuse("the GPU driver refuses a request: the device is lost, or has no stream memory operations");
  asked_ = true;
  asked_layer_ = layer;
}

void DevicePager::wait(void* stream) {
  require(asked_, "wait: no step was asked for");
  asked_ = false;
  if (driver_.wait_word(stream, spec_.words_on_device + kReply * 4, static_cast<uint32_t>(enqueued_), kWaitGreaterEqual) != 0) {
    refuse("the GPU driver refuses to wait for a step: the device is lost, or has no stream memory operations");
  }
}

void DevicePager::run() {
  pthread_setname_np(pthread_self(), "pager");
  check(driver_.context_set(context_));
  uint64_t served = 0;
  int64_t spin_ns = 0;
  // A stop answers what the device was told to ask: it must not wait for ever.
  while (!stop_.load(std::memory_order_acquire) || armed_.value() > served) {
    if (!wait_for_armed(served + 1, spin_ns)) {
      spin_ns = 0;  // nothing is being decoded: a poll before every idle look would take a share of a CPU for ever
      if (fast_ != nullptr) look_at_lane();
      continue;
    }
    if (!wait_for_request(served + 1)) return;
    spin_ns = kSpinNs;
    ++served;
    const Step& step = ring_[served % kRing];
    if (fast_ != nullptr) {
      answer_fast(served, step);
    } else {
      answer(served, step);
    }
    served_.store(served, std::memory_order_release);
  }
}

bool DevicePager::wait_for_armed(uint64_t number, int64_t spin_ns) {
  if (hints_ != nullptr) {
    Spinner spinner(spin_ns);
    while (armed_.value() < number && spinner.spin()) pump(number - 1);
    spin_ns = 0;
  }
  return armed_.wait(number, abi_now_ns() + kIdleNs, spin_ns);
}

bool DevicePager::wait_for_request(uint64_t number) {
  const uint32_t wanted = static_cast<uint32_t>(number);
  uint64_t deadline_ns = 0;
  // The words are compared cyclically, as the device compares them: they wrap after some weeks.
  while (static_cast<int32_t>(__atomic_load_n(&spec_.words[kRequest], __ATOMIC_ACQUIRE) - wanted) < 0) {
    if (stop_.load(std::memory_order_acquire)) {
      if (deadline_ns == 0) deadline_ns = abi_now_ns() + kStopNs;
      if (abi_now_ns() > deadline_ns) return false;
    }
    pump(number - 1);
    for (int i = 0; i < 8; ++i) cpu_relax();
  }
  return true;
}

void DevicePager::answer(uint64_t number, const Step& step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sent_ = false;
  choose(step, number);
  if (dirty_[step.layer]) send_table(step.layer, spec_.copy_stream);
  reply(number);
}

void DevicePager::start_step(const Step& step, uint64_t pass) {
  slots_.settle(pass - 1, kNoPass);
  end_transit(step.layer);
  heat_.advance(step.layer);
  misses_.clear();
  gather_.clear();
  gathered_.clear();
  transit_used_ = passing_ = copies_ = 0;
  coldest_.clear();
  coldest_left_ = 0;
  coldest_known_ = false;
  step_picks_ = step.rows * spec_.top_k;
  if (hints_ != nullptr) {
    end_visits(pass - 1);
    fill_pool(pass - 1);
    meet_hint(step, pass);
  }
  ++counters_[kSteps];
}

void DevicePager::choose(const Step& step, uint64_t pass) {
  const uint32_t layer = step.layer, first = layer * spec_.experts_per_layer;
  const int64_t* picks = spec_.picks + static_cast<size_t>(layer) * spec_.max_rows * spec_.top_k;
  start_step(step, pass);
  for (uint32_t i = 0; i < step.rows * spec_.top_k; ++i) {
    const int64_t expert = picks[i];
    if (expert < 0 || expert >= static_cast<int64_t>(spec_.experts_per_layer)) continue;  // a masked pick
    const uint32_t record = first + static_cast<uint32_t>(expert);
    const int32_t slot = slots_.resident(record);
    ++counters_[kPicks];
    counters_[kHits] += slot != SlotTable::kNone;
    if (seen_[static_cast<size_t>(expert)] == pass) continue;
    seen_[static_cast<size_t>(expert)] = pass;
    heat_.touch(record);
    if (slot != SlotTable::kNone) {
      slots_.read(slot, pass);
    } else {
      misses_.push_back({static_cast<uint32_t>(expert), heat_.score(record)});
    }
  }
  std::sort(misses_.begin(), misses_.end(),
            [](const Miss& a, const Miss& b) { return a.heat != b.heat ? a.heat > b.heat : a.expert < b.expert; });
  weigh_visitors();
  for (const Miss& miss : misses_) {
    keep_visitors(&miss, pass);
    bring(layer, miss, pass);
  }
  keep_visitors(nullptr, pass);
  launch_gather(layer, pass);
}

Lane DevicePager::bring(uint32_t layer, const Miss& miss, uint64_t pass) {
  const uint32_t record = layer * spec_.experts_per_layer + miss.expert;
  ++counters_[kMissed];
  if (copies_ < spec_.max_copies) {
    const Place found = find_place(record, miss.heat, pass);
    const bool passes = !found.earned && transit_used_ == spec_.num_transit && passing_ < spec_.num_passing;
    if (found.slot != SlotTable::kNone && (found.earned || passes)) {
      const uint32_t place = spec_.num_transit + static_cast<uint32_t>(found.slot);
      // The old record goes first: whatever becomes of the copy, its bytes are no longer to be trusted.
      drive_out(found.slot, pass - 1);
      if (copy(record, place)) {
        slots_.begin_landing(found.slot, record, pass);
        point(layer, miss.expert, in_slot(place));
        passing_ += passes;
        ++counters_[passes ? kTransit : kAdmitted];
        note_gathered(miss.expert, place, passes ? kTransit : kAdmitted);
        return Lane::kAdmit;
      }
    } else if (transit_used_ < spec_.num_transit && copy(record, transit_used_)) {
      point(layer, miss.expert, in_slot(transit_used_));
      in_transit_[layer].push_back(miss.expert);
      ++counters_[kTransit];
      note_gathered(miss.expert, transit_used_++, kTransit);
      return Lane::kAdmit;
    }
  }
  ++counters_[kInPlace];
  return Lane::kZeroCopy;
}

DevicePager::Place DevicePager::find_place(uint32_t record, float heat, uint64_t pass) {
  const bool known = heat_.touches(record) >= spec_.admit_after;
  const int32_t free = slots_.find_free(pass - 1);
  if (free != SlotTable::kNone) return {free, known};
  if (!coldest_known_) slots_.find_victims(heat_, pass - 1, step_picks_, &coldest_);
  coldest_known_ = true;
  if (coldest_left_ == coldest_.size()) return {SlotTable::kNone, false};
  const auto& [coldest, slot] = coldest_[coldest_left_];
  return {slot, known && heat > spec_.admit_margin * coldest};
}

void DevicePager::drive_out(int32_t slot, uint64_t passes_done) {
  const int32_t old = slots_.record_in(static_cast<uint32_t>(slot));
  if (old == SlotTable::kNone) return;
  if (coldest_left_ < coldest_.size() && coldest_[coldest_left_].second == slot) ++coldest_left_;
  slots_.evict(slot, passes_done);
  point_at_host(static_cast<uint32_t>(old));
  if (fast_ != nullptr) ++fast_->evictions;
}

bool DevicePager::copy(uint32_t record, uint32_t slot) {
  const MoeCudaCopy one{in_slot(slot), on_host(record)};
  if (driver_.gather != nullptr) {
    gather_.push_back(one);
    ++copies_;
    return true;
  }
  for (uint32_t i = 0; i < spec_.link_derate; ++i) {
    if (!move(&one, 1)) return false;
  }
  ++copies_;
  sent_ = true;
  counters_[kBytes] += spec_.record_stride;
  return true;
}

bool DevicePager::move(const MoeCudaCopy* copies, uint32_t count) {
  if (driver_.gather != nullptr) return check(driver_.gather(copies, count, spec_.record_stride, spec_.copy_stream));
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t* from = spec_.host + (copies[i].source - spec_.host_on_device);
    if (!check(driver_.copy_to_device(copies[i].to, from, spec_.record_stride, spec_.copy_stream))) return false;
  }
  return true;
}

void DevicePager::reply(uint64_t number) {
  const uint32_t value = static_cast<uint32_t>(number);
  if (sent_ && check(driver_.write_word(spec_.copy_stream, spec_.words_on_device + kReply * 4, value, kWriteDefault))) return;
  // Nothing to wait for; or the stream takes nothing any more, and a device that waits for ever is worse than a step that is thrown away.
  __atomic_store_n(&spec_.words[kReply], value, __ATOMIC_RELEASE);
}

bool DevicePager::send_table(uint32_t layer, void* stream) {
  const size_t block = static_cast<size_t>(spec_.num_parts) * spec_.experts_per_layer;
  const uint64_t to = spec_.table + layer * block * sizeof(int64_t);
  if (!check(driver_.copy_to_device(to, spec_.mirror + layer * block, block * sizeof(int64_t), stream))) return false;
  sent_ = true;
  dirty_[layer] = false;
  return true;
}

void DevicePager::end_transit(uint32_t layer) {
  for (const uint32_t expert : in_transit_[layer]) point_at_host(layer * spec_.experts_per_layer + expert);
  in_transit_[layer].clear();
}

void DevicePager::point(uint32_t layer, uint32_t expert, uint64_t address) {
  int64_t* rows = spec_.mirror + static_cast<size_t>(layer) * spec_.num_parts * spec_.experts_per_layer + expert;
  const int64_t* offsets = offsets_.data() + static_cast<size_t>(layer) * spec_.num_parts;
  for (uint32_t part = 0; part < spec_.num_parts; ++part) {
    rows[static_cast<size_t>(part) * spec_.experts_per_layer] = static_cast<int64_t>(address) + offsets[part];
  }
  dirty_[layer] = true;
  if (fast_ != nullptr) set_record(layer, expert, address);
}

void DevicePager::point_at_host(uint32_t record) {
  point(record / spec_.experts_per_layer, record % spec_.experts_per_layer, on_host(record));
}

bool DevicePager::check(int code) {
  if (code != 0) failed_.store(true, std::memory_order_release);
  return code == 0;
}

void DevicePager::put(uint32_t record, uint32_t slot) {
  require(record < spec_.num_layers * spec_.experts_per_layer, "record: out of range");
  require(slot >= spec_.num_transit && slot < spec_.num_slots, "slot: out of range, or a transit slot");
  const std::lock_guard<std::mutex> lock(mutex_);
  require(slot < usable_, "slot: there is no memory for it now");
  const int32_t place = static_cast<int32_t>(slot - spec_.num_transit);
  end_hints();
  slots_.settle(enqueued_, kNoPass);
  require(slots_.record_in(static_cast<uint32_t>(place)) == SlotTable::kNone && slots_.resident(record) == SlotTable::kNone,
          "the slot or the record is taken");
  if (slots_.reserved(place)) slots_.release(place);
  slots_.begin_landing(place, record, enqueued_);
  slots_.settle(enqueued_, kNoPass);
  point(record / spec_.experts_per_layer, record % spec_.experts_per_layer, in_slot(slot));
}

void DevicePager::vacate(uint32_t first_slot, uint32_t count) {
  require(first_slot + count <= spec_.num_slots, "slots: out of range");
  const std::lock_guard<std::mutex> lock(mutex_);
  end_hints();
  slots_.settle(enqueued_, kNoPass);
  for (uint32_t slot = std::max(first_slot, spec_.num_transit); slot < first_slot + count; ++slot) {
    const int32_t record = slots_.record_in(slot - spec_.num_transit);
    if (record == SlotTable::kNone) continue;
    slots_.evict(static_cast<int32_t>(slot - spec_.num_transit), enqueued_);
    point_at_host(static_cast<uint32_t>(record));
  }
  for (uint32_t layer = 0; layer < spec_.num_layers; ++layer) {
    end_transit(layer);
    if (fast_ != nullptr) unmask(layer);
  }
}

void DevicePager::limit(uint32_t usable_slots) {
  require(usable_slots >= spec_.num_transit && usable_slots <= spec_.num_slots, "usable slots: out of range, or fewer than transit slots");
  const std::lock_guard<std::mutex> lock(mutex_);
  end_hints();
  slots_.settle(enqueued_, kNoPass);
  for (uint32_t slot = usable_slots; slot < usable_; ++slot) {
    require(slots_.record_in(slot - spec_.num_transit) == SlotTable::kNone, "a slot that shall not be used holds a record");
  }
  const std::vector<int32_t> pool = slots_.pool();
  for (const int32_t slot : pool) {
    if (static_cast<uint32_t>(slot) + spec_.num_transit >= usable_slots) slots_.release(slot);
  }
  // An empty slot that a pass reads which is never over: nobody is given it.
  for (uint32_t slot = usable_slots; slot < usable_; ++slot) slots_.read(static_cast<int32_t>(slot - spec_.num_transit), kNeverOver);
  for (uint32_t slot = usable_; slot < usable_slots; ++slot) slots_.read(static_cast<int32_t>(slot - spec_.num_transit), enqueued_);
  usable_ = usable_slots;
  while (slots_.pool().size() > pool_size()) slots_.release(slots_.pool().back());
}

void DevicePager::flush(void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  end_hints();
  for (uint32_t layer = 0; layer < spec_.num_layers; ++layer) {
    end_transit(layer);
    if (fast_ != nullptr) unmask(layer);
    if (dirty_[layer] && !send_table(layer, stream)) throw Error(GLM53_SYSTEM, "the GPU driver refuses to copy a table");
  }
}

void DevicePager::where(int32_t* slot_of) {
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_.settle(enqueued_, kNoPass);
  for (uint32_t record = 0; record < spec_.num_layers * spec_.experts_per_layer; ++record) {
    const int32_t slot = slots_.resident(record);
    const bool stays = slot != SlotTable::kNone && !slots_.reserved(slot);
    slot_of[record] = stays ? slot + static_cast<int32_t>(spec_.num_transit) : SlotTable::kNone;
  }
}

void DevicePager::read_heat(float* slow, float* fast) {
  const std::lock_guard<std::mutex> lock(mutex_);
  heat_.read(slow, fast);
}

void DevicePager::write_heat(const float* slow, const float* fast) {
  const std::lock_guard<std::mutex> lock(mutex_);
  heat_.write(slow, fast);
}

void DevicePager::stats(uint64_t counters[8]) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::copy(std::begin(counters_), std::end(counters_), counters);
  if (failed_.load(std::memory_order_acquire)) throw Error(GLM53_SYSTEM, "a copy to the GPU failed");
}

}  // namespace glm53
