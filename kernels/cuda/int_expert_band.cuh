/* One band of 128 output columns of a matrix, for the rows of one run: steps 4 and 5 of docs/arithmetic.md in a block of 8 warps.
 *
 * Warp w takes the 64 columns w % 2 of the band and group w / 2 of the input blocks, so that a group's sum stays in one warp's registers
 * and its blocks ascend. Weights come through a ring of stages in shared memory, filled by cp.async well ahead of their use; the ring runs
 * on from one work item to the next, so that the memory never waits for an epilogue. Each warp has its own ring: no barrier in the loop.
 */
#ifndef GLM53_CUDA_INT_EXPERT_BAND_CUH_
#define GLM53_CUDA_INT_EXPERT_BAND_CUH_

#include <stdint.h>

#include "cuda/int_expert_math.cuh"
#include "cuda/int_expert_tiles.cuh"

namespace glm53 {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = 32 * kWarps;
constexpr uint32_t kBlocksPerMultiprocessor = 2;
constexpr uint32_t kGroups = 4;
constexpr uint32_t kColumnWarps = kWarps / kGroups;
constexpr uint32_t kWarpTiles = kBlock / 16 / kColumnWarps; /* tiles side by side in a warp */
constexpr uint32_t kStageInputs = 64;                       /* four slices of 16 inputs */
constexpr uint32_t kBlockStages = kBlock / kStageInputs;
constexpr uint32_t kStageActivationBytes = 2 * kStageInputs; /* of one row */

/* A slice of a warp's stage: its tiles side by side. The lanes (g, tg) of a warp read word K g + i of slice tg: slices that start 8 banks
 * apart have no conflict. */
__host__ __device__ constexpr uint32_t slice_words(uint32_t k) { return (kWarpTiles * 8u * k + 31u) / 32u * 32u + 8u; }
__host__ __device__ constexpr uint32_t warp_stage_bytes(uint32_t k) { return 4u * 4u * slice_words(k); }

/* Shared memory of a block. Two blocks fit a multiprocessor: of 228 KB (compute capability 9.0, 10.x) or of 100 KB (8.6, 8.9, 12.0). */
struct BlockMemory {
  uint32_t stages;     /* of each warp's ring */
  uint32_t reductions; /* buffers for the sums of the groups: with two, a block's warps meet once an item instead of twice */
  uint32_t bytes;
};

__host__ __device__ constexpr BlockMemory block_memory(bool roomy, uint32_t k, uint32_t rows) {
  const uint32_t budget = (roomy ? 72u : 46u) * 1024u;
  const uint32_t reductions = roomy ? 2u : 1u;
  const uint32_t reduction_bytes = reductions * kGroups * rows * kBlock * 4u;
  const uint32_t stage_bytes = kWarps * warp_stage_bytes(k);
  uint32_t stages = (budget - reduction_bytes) / stage_bytes;
  if (stages < 2u) stages = 2u;
  if (stages > 6u) stages = 6u;
  return {stages, reductions, reduction_bytes + stages * stage_bytes};
}

/* Which device memory budget this translation unit is compiled for. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool kRoomy = true;
#else
constexpr bool kRoomy = false;
#endif

/* What a warp needs to know of a matrix: it is the same for every item of a launch. */
struct MatrixGeometry {
  uint32_t in_features;
  uint32_t row_bytes;   /* of 16 inputs: out_features / 16 tiles */
  uint32_t first_block; /* of the warp's group */
  uint32_t num_blocks;  /* of the warp's group, 0 for a late one that is empty */

  __device__ __forceinline__ MatrixGeometry(uint32_t in, uint32_t out, uint32_t k, uint32_t group) : in_features(in) {
    row_bytes = out / 16u * 32u * k;
    const uint32_t blocks = in / kBlock, length = (blocks + kGroups - 1) / kGroups;
    first_block = min(group * length, blocks);
    num_blocks = min(length, blocks - first_block);
  }
};

__device__ __forceinline__ void copy16(uint32_t to_shared, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to_shared), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/* A value that the compiler keeps in a register instead of computing it anew at every use. */
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

/* A warp's ring of weight stages. `Items` says which items the block works on: bool next(const uint8_t*& band). */
template <int K, int Stages, typename Items>
class WeightRing {
 public:
  static constexpr uint32_t kTileBytes = 32u * K;
  static constexpr uint32_t kSliceBytes = 4u * slice_words(K);
  static constexpr uint32_t kStageBytes = warp_stage_bytes(K);
  static constexpr uint32_t kSliceChunks = kWarpTiles * kTileBytes / 16u; /* of 16 bytes; eight lanes copy a slice */
  static constexpr uint32_t kLaneChunks = (kSliceChunks + 7u) / 8u;

  /* memory: Stages * kStageBytes of shared memory. column_warp: which of the band's parts the warp takes. */
  __device__ __forceinline__ WeightRing(uint8_t* memory, const MatrixGeometry& geometry, const Items& items, uint32_t lane,
                                        uint32_t column_warp)
      : items_(items), memory_(memory), piece_(lane % 8u) {
    const uint32_t slice = lane / 8u;
    shared_ = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + slice * kSliceBytes + piece_ * 16u;
    stage_stride_ = 4u * geometry.row_bytes;
    item_stages_ = geometry.num_blocks * kBlockStages;
    first_ = (geometry.first_block * (kBlock / 16u) + slice) * geometry.row_bytes + column_warp * kWarpTiles * kTileBytes + piece_ * 16u;
    keep(shared_);
    keep(stage_stride_);
    keep(first_);
    for (int stage = 0; stage < Stages - 1; ++stage) fetch();
  }

  /* The item after the one whose work begins now (its first stages are in the ring already). */
  __device__ __forceinline__ void set_upcoming(uint32_t item) { items_.upcoming = item; }

  /* Starts the copy of the next stage, if any is left. */
  __device__ __forceinline__ void fetch() {
    if (left_ == 0 && item_stages_ != 0) {
      const uint8_t* band;
      if (items_.next(band)) {
        source_ = band + first_;
        left_ = item_stages_;
      }
    }
    if (left_ != 0) {
#pragma unroll
      for (uint32_t i = 0; i < kLaneChunks; ++i) {
        if (8u * (i + 1u) <= kSliceChunks || piece_ + 8u * i < kSliceChunks) copy16(shared_ + fill_ + i * 128u, source_ + i * 128u);
      }
      source_ += stage_stride_;
      --left_;
    }
    end_copy_group();
    fill_ = fill_ == (Stages - 1) * kStageBytes ? 0 : fill_ + kStageBytes;
  }

  /* The next stage, complete and visible to the whole warp; the one before it is handed back and refilled. Half: of a block of inputs. */
  template <uint32_t Half>
  __device__ __forceinline__ const uint32_t* take() {
    wait_copy_groups<Stages - 2>();
    __syncwarp();
    fetch();
    const uint8_t* stage = memory_ + drain_;
    drain_ = drain_ == (Stages - 1) * kStageBytes ? 0 : drain_ + kStageBytes;
    return reinterpret_cast<const uint32_t*>(stage);
  }

 private:
  Items items_;
  const uint8_t* memory_;
  const uint8_t* source_ = nullptr;
  uint32_t shared_, piece_;
  uint32_t left_ = 0, fill_ = 0, drain_ = 0;
  uint32_t stage_stride_, item_stages_, first_;
};

/* Quantised inputs of the rows of a step, as prepare_rows and finish_inner write them. Row p: 2 * in bytes, for every stage the high bytes
 * of 64 inputs, then the low ones; and for every block of 128 inputs the scale times 2^-17 (as bits) and the sum of q. */
struct QuantisedRows {
  uint8_t* bytes;
  uint2* blocks;
};

__device__ __forceinline__ void store_quantised(const QuantisedRows& to, uint32_t row, uint32_t in_features, uint32_t block,
                                                const QuantisedFour& q, uint32_t lane) {
  uint8_t* stage = to.bytes + static_cast<size_t>(row) * 2u * in_features + (block * 2u + lane / 16u) * kStageActivationBytes;
  *reinterpret_cast<uint32_t*>(stage + lane % 16u * 4u) = q.high;
  *reinterpret_cast<uint32_t*>(stage + kStageInputs + lane % 16u * 4u) = q.low;
  if (lane == 0) {
    to.blocks[static_cast<size_t>(row) * (in_features / kBlock) + block] =
        make_uint2(__float_as_uint(q.scale * 0x1p-17f), static_cast<uint32_t>(q.sum));
  }
}

/* A lane's view of the activations of one item: what it needs next is already on its way from the L2 cache. */
template <int NB>
class ActivationStream {
 public:
  /* rows: numbers in `from` of the run's rows (num_rows of them). */
  template <typename RowOf>
  __device__ __forceinline__ ActivationStream(const QuantisedRows& from, const MatrixGeometry& geometry, uint32_t num_rows, RowOf row_of,
                                              uint32_t lane) {
    const uint32_t g = lane / 4u, tg = lane % 4u, blocks = geometry.in_features / kBlock;
#pragma unroll
    for (int n = 0; n < NB; ++n) {
      /* Columns of rows that the run does not have are computed from another row and never looked at. */
      const uint32_t byte_row = row_of(min(4u * n + g / 2u, num_rows - 1u)), scale_row = row_of(min(4u * n + tg, num_rows - 1u));
      bytes_[n] = from.bytes + static_cast<size_t>(byte_row) * 2u * geometry.in_features +
                  geometry.first_block * kBlockStages * kStageActivationBytes + (g % 2u) * kStageInputs + tg * 16u;
      blocks_[n] = from.blocks + static_cast<size_t>(scale_row) * blocks + geometry.first_block;
      next_bytes_[n] = __ldcg(reinterpret_cast<const uint4*>(bytes_[n]));
      next_block_[n] = __ldcg(blocks_[n]);
    }
  }
  /* Operand B of the next stage. Reads one stage ahead: the buffers are longer than their contents by that much. */
  __device__ __forceinline__ void stage(Activations<NB>& x) {
    x.spread(next_bytes_);
#pragma unroll
    for (int n = 0; n < NB; ++n) {
      bytes_[n] += kStageActivationBytes;
      next_bytes_[n] = __ldcg(reinterpret_cast<const uint4*>(bytes_[n]));
    }
  }
  __device__ __forceinline__ void block(float (&scale)[NB], int32_t (&sum)[NB]) {
#pragma unroll
    for (int n = 0; n < NB; ++n) {
      scale[n] = __uint_as_float(next_block_[n].x);
      sum[n] = static_cast<int32_t>(next_block_[n].y);
      next_block_[n] = __ldcg(++blocks_[n]);
    }
  }

 private:
  const uint8_t* bytes_[NB];
  const uint2* blocks_[NB];
  uint4 next_bytes_[NB];
  uint2 next_block_[NB];
};

/* z of the warp's columns and group: z[tile][n][0] of column g, [1] of column g + 8, for row 4 n + tg. Sums begin at 0 and the term -510 S
 * joins them after the products: the same number modulo 2^32, and no registers to fill with the term for every tile. */
template <int K, int NB, typename Ring, typename Stream>
__device__ __forceinline__ void multiply_group(Ring& ring, Stream& stream, uint32_t num_blocks, const PowersOfTwo& powers, uint32_t lane,
                                               float (&z)[kWarpTiles][NB][2]) {
  const uint32_t g = lane / 4u, slice = lane % 4u * slice_words(K);
  uint32_t own_at = slice + K * g, before_at = slice + (g == 0 ? 8u * K : K * g) - 1u; /* the ring of a tile closes at its end */
  keep(own_at);
  keep(before_at);
#pragma unroll
  for (uint32_t t = 0; t < kWarpTiles; ++t) {
#pragma unroll
    for (int n = 0; n < NB; ++n) z[t][n][0] = z[t][n][1] = 0.0f;
  }
#pragma unroll 1
  for (uint32_t block = 0; block < num_blocks; ++block) {
    float scale[NB];
    int32_t sum[NB], sums[kWarpTiles][NB][4];
    const int32_t zeros[NB][4] = {};
    stream.block(scale, sum);
    const auto add_stage = [&](const uint32_t* words, bool first) {
      Activations<NB> x;
      stream.stage(x);
#pragma unroll
      for (uint32_t t = 0; t < kWarpTiles; ++t) {
        uint32_t own[K + 1];
        load_words<K>(words + own_at + t * 8u * K, words[before_at + t * 8u * K], own);
        if (first) {
          add_tile<K, NB>(own, powers, x, sums[t], zeros);
        } else {
          add_tile<K, NB>(own, powers, x, sums[t], sums[t]);
        }
      }
    };
    static_assert(kBlockStages == 2, "two stages a block");
    add_stage(ring.template take<0>(), true);
    add_stage(ring.template take<1>(), false);
#pragma unroll
    for (int n = 0; n < NB; ++n) {
      const float constant = -238.0f * static_cast<float>(sum[n]);
#pragma unroll
      for (uint32_t t = 0; t < kWarpTiles; ++t) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          /* Modulo 2^32: the whole sum fits 32 bits, its parts need not. */
          const uint32_t a = static_cast<uint32_t>(sums[t][n][2 * c]) * 256u + static_cast<uint32_t>(sums[t][n][2 * c + 1]) -
                             510u * static_cast<uint32_t>(sum[n]);
          z[t][n][c] = fmaf(fmaf(887.0f, static_cast<float>(static_cast<int32_t>(a)), constant), scale[n], z[t][n][c]);
        }
      }
    }
  }
}

/* Leaves a warp's z in the reduction buffer [group][rows][128]. */
template <int NB>
__device__ __forceinline__ void store_group(float* buffer, uint32_t rows, uint32_t warp, uint32_t lane,
                                            const float (&z)[kWarpTiles][NB][2]) {
  const uint32_t g = lane / 4u, tg = lane % 4u, column = warp % kColumnWarps * (kWarpTiles * 16u), group = warp / kColumnWarps;
#pragma unroll
  for (int n = 0; n < NB; ++n) {
    float* row = buffer + (group * rows + 4u * n + tg) * kBlock + column + g;
#pragma unroll
    for (uint32_t t = 0; t < kWarpTiles; ++t) {
      row[t * 16u] = z[t][n][0];
      row[t * 16u + 8u] = z[t][n][1];
    }
  }
}

/* Step 5 for a lane's four columns of one row. */
__device__ __forceinline__ Four add_groups(const float* buffer, uint32_t rows, uint32_t row, uint32_t lane) {
  Four g[kGroups];
#pragma unroll
  for (uint32_t i = 0; i < kGroups; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(buffer + (i * rows + row) * kBlock + lane * 4u);
    g[i] = {{x.x, x.y, x.z, x.w}};
  }
  Four z;
#pragma unroll
  for (int i = 0; i < 4; ++i) z.v[i] = (g[0].v[i] + g[1].v[i]) + (g[2].v[i] + g[3].v[i]);
  return z;
}

}  // namespace glm53

#endif /* GLM53_CUDA_INT_EXPERT_BAND_CUH_ */
