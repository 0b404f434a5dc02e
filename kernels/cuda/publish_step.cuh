/* The device's side of "publish": a block per row copies its picks and activations to mapped host memory, the last block raises the word.
 *
 * A block's first thread fences what all its threads stored (they met at a barrier) before the block counts as arrived, and the last one
 * fences once more behind the arrivals: the word cannot overtake any store of any block.
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
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system(); /* the whole block's stores, towards the host */
  if (gridDim.x > 1) {
    if (atomicAdd(args.arrivals, 1u) + 1u != gridDim.x) return;
    *args.arrivals = 0;     /* for the next step: it starts when this kernel has ended */
    __threadfence_system(); /* every block's stores, through their arrivals */
  }
  *static_cast<volatile uint32_t*>(args.word) = args.value;
}

}  // namespace glm53

#endif /* GLM53_CUDA_PUBLISH_STEP_CUH_ */
