// One exception type inside the tier code; bindings/ turns it into a code and a text.
#pragma once

#include <cstdarg>
#include <stdexcept>
#include <string>

#include "expert_region.h"

namespace glm53 {

class Error : public std::runtime_error {
 public:
  Error(Glm53Error code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Glm53Error code() const { return code_; }

 private:
  Glm53Error code_;
};

// printf-style text, because the messages are full of numbers.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
// `what`: strerror(errno).
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace glm53
