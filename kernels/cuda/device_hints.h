// What hints add to a pager.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "expert_pager.h"

namespace glm53 {

struct HintParts {
  explicit HintParts(const PagerSpec& spec);

  // By the number of the step that a hint was given in, mod the ring's size: rows << 8 | width, 0 for none.
  std::array<std::atomic<uint32_t>, 1024> given{};
};

}  // namespace glm53
