// How fast records come into slots, by the copy engine and by a gather on the multiprocessors, and whether a gather runs at all where the
// pager needs it: beside a stream that waits for a word.
//
// Why that is tried: streams may share a queue of the hardware. A copy has the copy engine's own; a kernel behind another stream's wait
// would stand there until the word comes, which the pager raises behind that kernel: for ever. Here the host raises the word whatever
// happens.
#pragma once

#include <cstdint>

#include "expert_pager.h"

namespace glm53 {

struct CopyRates {
  double engine, gather;  // bytes per second
};

// glm53_pager_copy_rates, kernels/include/expert_pager.h. Throws kInvalid naming what is missing, kSystem with what went wrong.
CopyRates measure_copies(const PagerSpec& spec, void* compute_stream, uint32_t group, uint64_t budget_ns);

}  // namespace glm53
