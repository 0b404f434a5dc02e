/* Which expert computes which picks: the run table, built on the device from the step's selection.
 *
 * A run is one expert and up to `rows` of its picks, so that its weights are decoded once for all of them. Runs are numbered in the order
 * in which experts first appear, which every block finds alike.
 */
#ifndef GLM53_CUDA_INT_EXPERT_RUNS_CUH_
#define GLM53_CUDA_INT_EXPERT_RUNS_CUH_

#include <stdint.h>

#include "moe_cuda.h"

namespace glm53 {

constexpr uint32_t kMaxPicks = MOE_CUDA_MAX_ROWS * MOE_CUDA_MAX_TOP_K;

/* A step's picks, as kernels read them. */
struct Selection {
  const uint64_t* records;
  const void* selected;
  uint32_t num_experts, picks, top_k, selected_type;

  /* The number of the pick's expert, or -1 when there is no such expert. */
  __device__ __forceinline__ int32_t expert(uint32_t pick) const {
    const int64_t e =
        selected_type == MOE_CUDA_INDEX_I64 ? static_cast<const int64_t*>(selected)[pick] : static_cast<const int32_t*>(selected)[pick];
    return e >= 0 && e < num_experts ? static_cast<int32_t>(e) : -1;
  }
  /* The address of the pick's record, or 0 when the pick is not computed here. */
  __device__ __forceinline__ uint64_t record(uint32_t pick) const {
    const int32_t e = expert(pick);
    return e < 0 ? 0 : records[e];
  }
};

struct alignas(16) RunTable {
  uint64_t record[kMaxPicks]; /* of a run */
  int32_t expert[kMaxPicks];  /* of a pick; -1: not computed here */
  uint16_t run[kMaxPicks];    /* of a run's first pick */
  uint16_t leaders[kMaxPicks / 32];
  uint8_t picks[kMaxPicks][MOE_MAX_ROWS]; /* of a run */
  uint32_t sizes[kMaxPicks];              /* of a run */
  uint32_t runs;

  /* Fills the table and returns the number of runs. Called by a block of at least kMaxPicks threads; ends with a barrier. */
  __device__ uint32_t build(const Selection& selection, uint32_t rows);
  /* Copies between shared memory and VRAM, by a whole block. Loading ends with a barrier and returns the number of runs. */
  __device__ void store(RunTable* to) const;
  __device__ uint32_t load(const RunTable* from);
};

__device__ __forceinline__ uint32_t RunTable::build(const Selection& selection, uint32_t rows) {
  const uint32_t i = threadIdx.x, num_picks = selection.picks;
  uint64_t address = 0;
  if (i < num_picks) {
    const int32_t e = selection.expert(i);
    address = e < 0 ? 0 : selection.records[e];
    expert[i] = address == 0 ? -1 : e;
  }
  if (i < kMaxPicks) sizes[i] = 0;
  __syncthreads();
  const int32_t mine = i < num_picks ? expert[i] : -1;
  uint32_t rank = 0, first = i; /* picks of the same expert before this one; the first pick of its run */
  if (mine >= 0) {
    for (uint32_t j = 0; j < i; ++j) {
      if (expert[j] != mine) continue;
      if (rank % rows == 0) first = j;
      ++rank;
    }
    if (rank % rows == 0) first = i;
  }
  const bool leads = mine >= 0 && first == i;
  const uint32_t leading = __ballot_sync(0xFFFFFFFFu, leads);
  if (i < kMaxPicks && i % 32 == 0) leaders[i / 32] = static_cast<uint16_t>(__popc(leading));
  __syncthreads();
  uint32_t before = 0, total = 0;
  for (uint32_t w = 0; w < kMaxPicks / 32; ++w) {
    if (w < i / 32) before += leaders[w];
    total += leaders[w];
  }
  if (leads) {
    const uint32_t number = before + __popc(leading & ((1u << (i % 32)) - 1u));
    run[i] = static_cast<uint16_t>(number);
    record[number] = address;
  }
  __syncthreads();
  if (mine >= 0) {
    const uint32_t number = run[first];
    picks[number][rank % rows] = static_cast<uint8_t>(i);
    atomicAdd(&sizes[number], 1u);
  }
  if (i == 0) runs = total;
  __syncthreads();
  return total;
}

__device__ __forceinline__ void RunTable::store(RunTable* to) const {
  for (uint32_t i = threadIdx.x; i < sizeof(RunTable) / 16u; i += blockDim.x) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(this)[i];
  }
}

__device__ __forceinline__ uint32_t RunTable::load(const RunTable* from) {
  for (uint32_t i = threadIdx.x; i < sizeof(RunTable) / 16u; i += blockDim.x) {
    reinterpret_cast<uint4*>(this)[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
  }
  __syncthreads();
  return runs;
}

}  // namespace glm53

#endif /* GLM53_CUDA_INT_EXPERT_RUNS_CUH_ */
