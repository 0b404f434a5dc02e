// Attach refuses on any mismatch and prints both values.
#pragma once

#include <cstdint>
#include <string>

#include "tier/error.h"

namespace glm53 {

struct Handshake {
  const std::string& path;

  void same(const char* field, uint64_t found, uint64_t expected) const {
    if (found == expected) return;
    throw Error(GLM53_MISMATCH, format("%s: %s is 0x%llx, expected 0x%llx", path.c_str(), field, static_cast<unsigned long long>(found),
                                       static_cast<unsigned long long>(expected)));
  }
};

}  // namespace glm53
