// DevicePager's part for hints.
#include <algorithm>

#include "cuda/device_pager.h"
#include "tier/error.h"

namespace glm53 {

HintParts::HintParts(const PagerSpec& spec) {
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

// ---- any thread ------------------------------------------------------------------------------------------------------------------------

void DevicePager::hint_stats(uint64_t counters[6]) { std::fill(counters, counters + 6, 0); }

}  // namespace glm53
