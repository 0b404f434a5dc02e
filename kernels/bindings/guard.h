// The boundary between C++ and C: exceptions stop here and become a code and a text of the calling thread.
#pragma once

#include <memory>
#include <new>
#include <string>

#include "tier/error.h"
#include "tier/region.h"

namespace glm53 {

struct LastError {
  int code = GLM53_OK;
  std::string text;
};
LastError& last_error();

// Runs `body`; on an exception stores it and returns `failure`.
template <typename Result, typename Body>
Result guarded(Result failure, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    last_error() = {error.code(), error.what()};
  } catch (const std::bad_alloc&) {
    last_error() = {GLM53_SYSTEM, "out of memory"};
  } catch (const std::exception& error) {
    last_error() = {GLM53_INTERNAL, error.what()};
  }
  return failure;
}

}  // namespace glm53

struct Glm53Arena {
  std::unique_ptr<glm53::Arena> impl;
};
struct Glm53Region {
  std::unique_ptr<glm53::Region> impl;
};
