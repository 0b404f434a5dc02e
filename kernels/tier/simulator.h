// Offline replay of a routing trace against a cache policy: how policies are compared, and what our own is tuned with.
#pragma once

#include <cstdint>
#include <vector>

#include "tier/options.h"

namespace glm53 {

enum class CachePolicy : uint32_t {
  kHeat = 0,    // ours: the engine's own heat table, slot table and planner
  kClock = 1,   // second chance, every miss is admitted
  kLru = 2,     // every miss is admitted
  kBelady = 3,  // knows the future: a miss is admitted only if it is wanted again before the resident that is wanted last. An upper bound
};

// picks: [tokens][num_layers][top_k], one decode stream; layers share the slots.
struct Trace {
  const uint16_t* picks = nullptr;
  uint32_t tokens = 0;
  uint32_t num_layers = 0;
  uint32_t top_k = 0;
  uint32_t experts_per_layer = 0;
};

struct CacheOutcome {
  uint64_t picks = 0;       // after the warm-up
  uint64_t hits = 0;        // of these
  uint64_t admissions = 0;  // of these: what the link has to carry besides
};

// Replays the trace; counts after the first warm_tokens tokens. options: num_slots, planner, heat. Throws kInvalid for a pick out of range.
CacheOutcome simulate_cache(CachePolicy policy, const Trace& trace, const TierOptions& options, uint32_t warm_tokens);

}  // namespace glm53
