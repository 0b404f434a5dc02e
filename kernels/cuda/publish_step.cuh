/* The device's side of "publish": a block per row copies its picks and activations to mapped host memory, the last block raises the word.
 *
 * Every thread fences its own stores towards the system before its block counts as arrived, so the word cannot overtake any of them.
 */
#ifndef GLM53_CUDA_PUBLISH_STEP_CUH_
#define GLM53_CUDA_PUBLISH_STEP_CUH_

#include <stdint.h>

#include "moe_cuda.h"

namespace glm53 {

constexpr uint32_t kPublishThreads = 256;

__global__ void __launch_bounds__(kPublishThreads) publish_step(const __grid_constant__ MoeCudaPublish args) {
  const uint32_t row = blockIdx.x;
  if (threadIdx.x < args.top_k) {
    const uint32_t pick = row * args.top_k + threadIdx.x;
    static_cast<int64_t*>(args.selected_to)[pick] = static_cast<const int64_t*>(args.selected)[pick];
  }
  if (args.x != nullptr) {
    const uint32_t pieces = args.hidden / 8u; /* of 16 bytes */
    const uint4* from = static_cast<const uint4*>(args.x) + static_cast<size_t>(row) * pieces;
    uint4* to = static_cast<uint4*>(args.x_to) + static_cast<size_t>(row) * pieces;
    for (uint32_t i = threadIdx.x; i < pieces; i += kPublishThreads) to[i] = from[i];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(args.arrivals, 1u) + 1u != gridDim.x) return;
  *args.arrivals = 0; /* for the next step: it starts when this kernel has ended */
  __threadfence_system();
  *static_cast<volatile uint32_t*>(args.word) = args.value;
}

}  // namespace glm53

#endif /* GLM53_CUDA_PUBLISH_STEP_CUH_ */
