#include "cuda/device_copy_rates.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <vector>

#include "cuda/device_driver.h"
#include "tier/error.h"

namespace glm53 {
namespace {

constexpr uint32_t kLanded = 16, kGate = 24, kPassed = 28;  // of the pager's words
constexpr uint32_t kWaitGreaterEqual = 0, kWriteDefault = 0;
constexpr uint32_t kMostRounds = 64, kLeastRounds = 2;  // one may be disturbed, however slow the link is
constexpr uint64_t kLandNs = 5'000'000'000;
constexpr uint64_t kBesideNs = 1'000'000'000;  // one record takes some milliseconds: the rest is for a machine that is busy
constexpr uint32_t kStep = 7919;               // prime: groups of a large arena lie far apart, as misses do

void require(bool holds, const char* problem) {
  if (!holds) throw Error(GLM53_INVALID, problem);
}

void ask(int code, const char* what) {
  if (code != 0) throw Error(GLM53_SYSTEM, format("%s (CUDA error %d)", what, code));
}

class Measurement {
 public:
  Measurement(const PagerSpec& spec, void* compute_stream, uint32_t group)
      : spec_(spec),
        driver_(spec.driver != nullptr ? *spec.driver : cuda_driver()),
        compute_(compute_stream),
        num_records_(spec.num_layers * spec.experts_per_layer),
        group_(std::min({group, spec.num_slots, num_records_})) {
    require(driver_.gather != nullptr, "driver: there is no gather to measure");
    require(group_ > 0, "a group of records, slots or records: there are none");
  }

  // The words are the pager's afterwards, as it expects them.
  ~Measurement() {
    for (const uint32_t word : {kLanded, kPassed}) __atomic_store_n(&spec_.words[word], 0, __ATOMIC_RELEASE);
  }

  CopyRates run(uint64_t budget_ns) {
    next_group(1);
    gather();  // loads the code: nothing waits yet
    land();
    try_beside_a_wait();
    const uint64_t start_ns = abi_now_ns();
    uint64_t engine_ns = std::numeric_limits<uint64_t>::max(), gather_ns = engine_ns;
    for (uint32_t round = 0; round < kMostRounds && (round < kLeastRounds || abi_now_ns() < start_ns + budget_ns); ++round) {
      engine_ns = std::min(engine_ns, time([&] { copy(); }));
      gather_ns = std::min(gather_ns, time([&] { gather(); }));
    }
    const double bytes = static_cast<double>(group_) * static_cast<double>(spec_.record_stride);
    return {bytes * 1e9 / static_cast<double>(engine_ns), bytes * 1e9 / static_cast<double>(gather_ns)};
  }

 private:
  void next_group(uint32_t count) {
    copies_.clear();
    for (uint32_t i = 0; i < count; ++i) {
      record_ = static_cast<uint32_t>((uint64_t{record_} + kStep) % num_records_);
      copies_.push_back({spec_.slots + i * spec_.record_stride, spec_.host_on_device + record_ * spec_.record_stride});
    }
  }

  void copy() {
    for (const MoeCudaCopy& c : copies_) {
      const uint8_t* from = spec_.host + (c.source - spec_.host_on_device);
      ask(driver_.copy_to_device(c.to, from, spec_.record_stride, spec_.copy_stream), "a copy is refused");
    }
  }

  void gather() {
    const auto count = static_cast<uint32_t>(copies_.size());
    ask(driver_.gather(copies_.data(), count, spec_.record_stride, spec_.copy_stream), "a gather is refused");
  }

  void mark(void* stream, uint32_t word) {
    ask(driver_.write_word(stream, spec_.words_on_device + word * 4, ++value_, kWriteDefault), "a word is refused");
  }

  // True when the word that was marked last has come.
  bool comes(uint32_t word, uint32_t value, uint64_t within_ns) const {
    const uint64_t deadline_ns = abi_now_ns() + within_ns;
    for (;;) {
      // The clock first: a thread that was stopped for longer than that looks at the word once more.
      const bool late = abi_now_ns() > deadline_ns;
      if (__atomic_load_n(&spec_.words[word], __ATOMIC_ACQUIRE) == value) return true;
      if (late) return false;
      std::this_thread::yield();
    }
  }

  void land() {
    mark(spec_.copy_stream, kLanded);
    if (!comes(kLanded, value_, kLandNs)) throw Error(GLM53_SYSTEM, "a record that was copied for a measurement does not land");
  }

  template <typename Way>
  uint64_t time(const Way& way) {
    next_group(group_);
    const uint64_t start_ns = abi_now_ns();
    way();
    land();
    return abi_now_ns() - start_ns;
  }

  void try_beside_a_wait() {
    Gate gate(spec_.words);
    ask(driver_.wait_word(compute_, spec_.words_on_device + kGate * 4, Gate::kOpen, kWaitGreaterEqual), "a wait is refused");
    mark(compute_, kPassed);
    const uint32_t passed = value_;
    next_group(1);
    gather();
    mark(spec_.copy_stream, kLanded);
    const bool ran = comes(kLanded, value_, kBesideNs);
    gate.open();
    if (!comes(kPassed, passed, kLandNs) || !comes(kLanded, value_, kLandNs)) {
      throw Error(GLM53_SYSTEM, "the device does not come to the end of a measurement");
    }
    gate.close();
    if (!ran) throw Error(GLM53_SYSTEM, "a gather does not run beside a stream that waits");
  }

  // Whatever is thrown, the device goes on. Closed again only when the device is known to have passed.
  class Gate {
   public:
    static constexpr uint32_t kOpen = 1;
    explicit Gate(uint32_t* words) : words_(words) {}
    ~Gate() {
      if (!passed_) open();
    }
    void open() const { __atomic_store_n(&words_[kGate], kOpen, __ATOMIC_RELEASE); }
    void close() {
      __atomic_store_n(&words_[kGate], 0, __ATOMIC_RELEASE);
      passed_ = true;
    }

   private:
    uint32_t* words_;
    bool passed_ = false;
  };

  const PagerSpec& spec_;
  const PagerDriver& driver_;
  void* compute_;
  uint32_t num_records_, group_;
  uint32_t record_ = 0, value_ = 0;
  std::vector<MoeCudaCopy> copies_;
};

}  // namespace

CopyRates measure_copies(const PagerSpec& spec, void* compute_stream, uint32_t group, uint64_t budget_ns) {
  return Measurement(spec, compute_stream, group).run(budget_ns);
}

}  // namespace glm53
