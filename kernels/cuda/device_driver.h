// The CUDA driver, found at run time: the library is built and loaded on machines that have none.
#pragma once

#include "expert_pager.h"

namespace glm53 {

// Throws kSystem with the name of what is missing.
const PagerDriver& cuda_driver();

}  // namespace glm53
