/* A decode step of one token in one launch: steps 1 to 8 by blocks of 16 warps, one a multiprocessor.
 *
 * With one row every pick is a run of its own, so there is no run table, and a block transforms and quantises the inputs of its item
 * itself. Half of the warps multiply gate and the other half up, so the activation needs no other block. Then each half takes items of
 * down, whose weights have been on their way since before; it waits for the bands of its pick by a counter in VRAM. Blocks with work for
 * gate and up never wait, and a block that waits keeps nobody from running but one that will find another multiprocessor, so the waiting
 * ends.
 */
#ifndef GLM53_CUDA_INT_EXPERT_ONE_ROW_CUH_
#define GLM53_CUDA_INT_EXPERT_ONE_ROW_CUH_

#include "cuda/int_expert_kernels.cuh"

namespace glm53 {

constexpr uint32_t kHalves = 2;
constexpr uint32_t kOneRowThreads = kHalves * kThreads;
constexpr uint64_t kOneRowLimitNs = 10000000000u; /* a pick's bands come within microseconds; after this the step is lost */

/* A stage of a warp's ring is a block of 128 inputs, so that its bookkeeping is done half as often as with WeightRing's. */
constexpr uint32_t kOneRowStages = 2;
__host__ __device__ constexpr uint32_t one_row_stage_bytes(uint32_t k) { return kBlockStages * warp_stage_bytes(k); }

/* 64 of gate's or up's inputs lie in shared memory as operand B wants them, both bytes of each four times. */
constexpr uint32_t kSpreadStageBytes = 4u * kStageActivationBytes;
__host__ __device__ constexpr uint32_t one_row_input_bytes(uint32_t hidden) { return kSpreadStageBytes / kStageInputs * hidden; }

/* Shared memory of a block: rings, sums [3][half][group][128] (of inner, and of down in turns), quantised inputs of gate and up, their
 * blocks. */
__host__ __device__ constexpr uint32_t one_row_bytes(uint32_t k, uint32_t hidden) {
  return kHalves * kWarps * kOneRowStages * one_row_stage_bytes(k) + 3u * kHalves * kGroups * kBlock * 4u +
         kHalves * one_row_input_bytes(hidden) + kHalves * (hidden / kBlock) * 8u;
}

/* The picks that are computed here, one a lane in ascending order. */
struct OneRowPicks {
  uint32_t present; /* bit per slot */
  uint32_t count, slot;
  uint64_t record;

  __device__ __forceinline__ OneRowPicks(const Selection& selection, uint32_t lane) {
    record = lane < selection.picks ? selection.record(lane) : 0;
    present = __ballot_sync(kFullWarp, record != 0);
    count = __popc(present);
    uint32_t rest = present;
#pragma unroll
    for (uint32_t i = 0; i < MOE_CUDA_MAX_TOP_K - 1u; ++i) rest = i < lane ? rest & (rest - 1u) : rest;
    slot = rest == 0 ? 0 : __ffs(rest) - 1u;
    record = __shfl_sync(kFullWarp, record, slot);
  }
  __device__ __forceinline__ uint64_t record_of(uint32_t run) const { return __shfl_sync(kFullWarp, record, run); }
  __device__ __forceinline__ uint32_t slot_of(uint32_t run) const { return __shfl_sync(kFullWarp, slot, run); }
};

/* A warp's weights: one band of its projection, if its block has one, then bands of down. */
struct OneRowItems {
  const OneRowPicks& picks;
  Divisor inner_bands, outer_bands;
  uint32_t outer_item, outer_total; /* the next one for the ring */

  /* Of the matrix whose trellis lies at `trellis` of the record. */
  template <int K>
  __device__ __forceinline__ const uint8_t* band(uint32_t run, uint32_t band, uint32_t trellis) const {
    return reinterpret_cast<const uint8_t*>(picks.record_of(run) + trellis) + band * (kBlock / 16u) * (32u * K);
  }
};

/* As WeightRing, over matrices of two shapes. */
template <int K>
class OneRowRing {
 public:
  static constexpr uint32_t kStageBytes = one_row_stage_bytes(K);
  static constexpr uint32_t kSliceChunks = kWarpTiles * 32u * K / 16u;
  static constexpr uint32_t kLaneChunks = (kSliceChunks + 7u) / 8u;

  __device__ __forceinline__ OneRowRing(uint8_t* memory, const StepArgs& args, const OneRowPicks& picks, const MatrixGeometry& inner,
                                        const MatrixGeometry& outer, uint32_t lane, uint32_t half, uint32_t column_warp)
      : items_{picks, args.inner_bands, args.outer_bands, kHalves * blockIdx.x + half, picks.count * args.outer_bands.divisor},
        memory_(memory),
        trellis_(args.shape.down_trellis),
        piece_(lane % 8u) {
    const uint32_t slice = lane / 8u, within = column_warp * kWarpTiles * 32u * K + piece_ * 16u;
    shared_ = static_cast<uint32_t>(__cvta_generic_to_shared(memory)) + slice * (4u * slice_words(K)) + piece_ * 16u;
    first_ = (outer.first_block * (kBlock / 16u) + slice) * outer.row_bytes + within;
    outer_stride_ = 4u * outer.row_bytes;
    outer_stages_ = outer.num_blocks;
    stride_ = 4u * inner.row_bytes;
    if (blockIdx.x < picks.count * args.inner_bands.divisor) {
      const uint32_t run = args.inner_bands.divide(blockIdx.x), band = blockIdx.x - run * args.inner_bands.divisor;
      source_ = items_.band<K>(run, band, projection_parts(args.shape, 2, half).trellis) +
                (inner.first_block * (kBlock / 16u) + slice) * inner.row_bytes + within;
      left_ = inner.num_blocks;
    }
    keep(shared_);
    for (uint32_t stage = 0; stage < kOneRowStages - 1; ++stage) fetch();
  }

  __device__ __forceinline__ void fetch() {
    if (left_ == 0 && items_.outer_item < items_.outer_total) {
      const uint32_t run = items_.outer_bands.divide(items_.outer_item);
      source_ = items_.band<K>(run, items_.outer_item - run * items_.outer_bands.divisor, trellis_) + first_;
      stride_ = outer_stride_;
      left_ = outer_stages_;
      items_.outer_item += kHalves * gridDim.x;
    }
    if (left_ != 0) {
#pragma unroll
      for (uint32_t part = 0; part < kBlockStages; ++part) {
#pragma unroll
        for (uint32_t i = 0; i < kLaneChunks; ++i) {
          if (8u * (i + 1u) > kSliceChunks && piece_ + 8u * i >= kSliceChunks) continue;
          copy16(shared_ + fill_ + part * warp_stage_bytes(K) + i * 128u, source_ + i * 128u);
        }
        source_ += stride_;
      }
      --left_;
    }
    end_copy_group();
    fill_ = fill_ == (kOneRowStages - 1) * kStageBytes ? 0 : fill_ + kStageBytes;
  }

  /* A half of a block, the first one first. */
  template <uint32_t Half>
  __device__ __forceinline__ const uint32_t* take() {
    if constexpr (Half != 0) return reinterpret_cast<const uint32_t*>(taken_ + Half * warp_stage_bytes(K));
    wait_copy_groups<kOneRowStages - 2>();
    __syncwarp();
    fetch();
    taken_ = memory_ + drain_;
    drain_ = drain_ == (kOneRowStages - 1) * kStageBytes ? 0 : drain_ + kStageBytes;
    return reinterpret_cast<const uint32_t*>(taken_);
  }

 private:
  OneRowItems items_;
  const uint8_t* memory_;
  const uint8_t* source_ = nullptr;
  const uint8_t* taken_ = nullptr;
  uint32_t trellis_, piece_, shared_;
  uint32_t left_ = 0, fill_ = 0, drain_ = 0;
  uint32_t stride_, outer_stride_, outer_stages_, first_;
};

/* One row of quantised inputs in shared memory. bytes: for every 64 inputs [4][high, low][4] pieces of 16 bytes, piece [i][plane][tg] being
 * the bytes 16 tg + 4 i .. + 3 of the plane, each four times. blocks: as QuantisedRows. */
struct SharedInputs {
  uint8_t* bytes;
  uint2* blocks;

  __device__ __forceinline__ void store(uint32_t block, const QuantisedFour& q, uint32_t lane) const {
    uint8_t* piece = bytes + (block * kBlockStages + lane / 16u) * kSpreadStageBytes + lane % 4u * 128u + lane % 16u / 4u * 16u;
    const uint32_t planes[2] = {q.high, q.low};
#pragma unroll
    for (uint32_t plane = 0; plane < 2; ++plane) {
      const uint32_t word = planes[plane];
      *reinterpret_cast<uint4*>(piece + plane * 64u) = make_uint4(__byte_perm(word, 0, 0x0000), __byte_perm(word, 0, 0x1111),
                                                                  __byte_perm(word, 0, 0x2222), __byte_perm(word, 0, 0x3333));
    }
    if (lane == 0) blocks[block] = make_uint2(__float_as_uint(q.scale * 0x1p-17f), static_cast<uint32_t>(q.sum));
  }
};

/* A lane's view of them. */
class SharedActivations {
 public:
  __device__ __forceinline__ SharedActivations(const SharedInputs& from, const MatrixGeometry& geometry, uint32_t lane)
      : bytes_(from.bytes + geometry.first_block * kBlockStages * kSpreadStageBytes + (lane / 4u % 2u) * 64u + lane % 4u * 16u),
        blocks_(from.blocks + geometry.first_block) {}
  __device__ __forceinline__ void stage(Activations<1>& x) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint4 four = *reinterpret_cast<const uint4*>(bytes_ + i * 128u);
      x.bytes[0][4 * i] = four.x;
      x.bytes[0][4 * i + 1] = four.y;
      x.bytes[0][4 * i + 2] = four.z;
      x.bytes[0][4 * i + 3] = four.w;
    }
    bytes_ += kSpreadStageBytes;
  }
  __device__ __forceinline__ void block(float (&scale)[1], int32_t (&sum)[1]) {
    const uint2 next = *blocks_++;
    scale[0] = __uint_as_float(next.x);
    sum[0] = static_cast<int32_t>(next.y);
  }

 private:
  const uint8_t* bytes_;
  const uint2* blocks_;
};

/* Eight warps meet. */
__device__ __forceinline__ void half_barrier(uint32_t half) { asm volatile("bar.sync %0, %1;" ::"r"(half + 1u), "n"(kThreads) : "memory"); }

__device__ __forceinline__ Four widen(uint2 halves) {
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&halves.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&halves.y));
  return {{low.x, low.y, high.x, high.y}};
}
__device__ __forceinline__ uint2 raw_part(uint64_t record, uint32_t part, uint32_t index) {
  return *reinterpret_cast<const uint2*>(reinterpret_cast<const __half*>(record + part) + index);
}

/* Step 6 with scales that are in registers. */
__device__ __forceinline__ Four finish_with(Four z, uint2 svh, uint64_t record, uint32_t bias_part, uint32_t column, uint32_t lane) {
  hadamard128(z, lane);
  Four y = times(z, widen(svh));
  if (bias_part != MOE_ABSENT) {
    const Four bias = part_halves(record, bias_part, column);
#pragma unroll
    for (int i = 0; i < 4; ++i) y.v[i] += bias.v[i];
  }
  return y;
}

/* A warp's sums of the one row: [128] of its group. */
__device__ __forceinline__ void store_row(float* sums, uint32_t warp, uint32_t lane, const float (&z)[kWarpTiles][1][2]) {
  if (lane % 4u != 0) return;
  float* row = sums + warp / kColumnWarps * kBlock + warp % kColumnWarps * (kWarpTiles * 16u) + lane / 4u;
#pragma unroll
  for (uint32_t t = 0; t < kWarpTiles; ++t) {
    row[t * 16u] = z[t][0][0];
    row[t * 16u + 8u] = z[t][0][1];
  }
}

/* Steps 1 to 3 of a half's projection, by its eight warps: four blocks of a warp are on their way at once. */
__device__ __forceinline__ void quantise_row(const StepArgs& args, uint64_t record, uint32_t suh, const SharedInputs& to, uint32_t warp,
                                             uint32_t lane) {
  constexpr uint32_t kAtOnce = 4;
  const uint32_t blocks = args.shape.hidden / kBlock;
  for (uint32_t first = warp; first < blocks; first += kAtOnce * kWarps) {
    Four h[kAtOnce];
    uint2 scale[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) { /* blocks that do not exist are computed from the last one and not stored */
      const uint32_t column = min(first + i * kWarps, blocks - 1u) * kBlock + lane * 4u;
      scale[i] = raw_part(record, suh, column);
      h[i] = args.x_dtype == MOE_DTYPE_F16 ? load_halves(static_cast<const __half*>(args.x) + column)
                                           : load_floats(static_cast<const float*>(args.x) + column);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      h[i] = times(h[i], widen(scale[i]));
      hadamard128(h[i], lane);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const QuantisedFour q = quantise(h[i]);
      if (first + i * kWarps < blocks) to.store(first + i * kWarps, q, lane);
    }
  }
}

/* The lane polls until a counter has come to `expected`; what was stored before its increments is then visible to the warp. */
__device__ __forceinline__ void wait_for_count(const uint32_t* counter, uint32_t expected, uint32_t lane) {
  if (lane == 0) {
    uint32_t seen = 0;
    uint64_t begin = 0;
    for (uint32_t tries = 0;; ++tries) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
      if (seen >= expected) break;
      if (tries % 1024u != 1023u) continue;
      uint64_t now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (begin == 0) begin = now;
      if (now - begin > kOneRowLimitNs) __trap();
    }
  }
  __syncwarp();
}

/* Step 8 for a band of the row. All rows of y are asked for before the first is added. */
__device__ __forceinline__ void sum_row(const StepArgs& args, uint32_t present, uint32_t column) {
  constexpr uint32_t kAtOnce = 8;
  Four sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  for (uint32_t first = 0; first < args.selection.top_k; first += kAtOnce) {
    Four y[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if ((present >> (first + i) & 1u) == 0) continue;
      weight[i] = weight_of(args, first + i);
      y[i] = load_floats(args.y + static_cast<size_t>(first + i) * args.shape.hidden + column);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if ((present >> (first + i) & 1u) == 0) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c) sum.v[c] = fmaf(weight[i], y[i].v[c], sum.v[c]);
    }
  }
  store_sum(args, 0, column, sum);
}

/* Gate, up and the activation of one band of a pick, by the whole block. `ready` counts a pick's bands. */
template <int K>
__device__ __forceinline__ void one_row_inner(const StepArgs& args, const OneRowPicks& picks, OneRowRing<K>& ring,
                                              const MatrixGeometry& geometry, uint32_t* ready, float* sums, const SharedInputs& inputs) {
  const MoeExpertShape& s = args.shape;
  const uint32_t lane = threadIdx.x % 32u, half = threadIdx.x / kThreads, warp = threadIdx.x / 32u % kWarps;
  const uint32_t run = args.inner_bands.divide(blockIdx.x), band = blockIdx.x - run * args.inner_bands.divisor;
  const uint32_t column = band * kBlock + lane * 4u, pick = picks.slot_of(run);
  const uint64_t record = picks.record_of(run);
  const MatrixParts gate = projection_parts(s, 2, 0), up = projection_parts(s, 2, 1);
  quantise_row(args, record, half == 0 ? gate.suh : up.suh, inputs, warp, lane);
  uint2 gate_svh = {}, up_svh = {}, down_suh = {};
  if (threadIdx.x < 32u) {
    gate_svh = raw_part(record, gate.svh, column);
    up_svh = raw_part(record, up.svh, column);
    down_suh = raw_part(record, s.down_suh, column);
  }
  half_barrier(half);
  SharedActivations stream(inputs, geometry, lane);
  float z[kWarpTiles][1][2];
  multiply_group<K, 1>(ring, stream, geometry.num_blocks, args.powers, lane, z);
  store_row(sums + half * (kGroups * kBlock), warp, lane, z);
  __syncthreads();
  if (threadIdx.x >= 32u) return;
  Four a = finish_with(add_groups(sums, 1, 0, lane), gate_svh, record, gate.bias, column, lane);
  const Four u = finish_with(add_groups(sums + kGroups * kBlock, 1, 0, lane), up_svh, record, up.bias, column, lane);
  activate(s.activation, s.act_limit, a, &u);
  a = times(a, widen(down_suh));
  hadamard128(a, lane);
  store_quantised(args.work.inner_rows, pick, s.inter, band, quantise(a), lane);
  __threadfence();
  __syncwarp();
  if (lane == 0) atomicAdd(ready + pick, 1u);
}

/* Needs: one row, gate and up and down of K bits, at least as many multiprocessors as top_k x (inter / 128), and groups of blocks that are
 * not empty. inner_arrivals [pick] counts a pick's bands, outer_arrivals [band] its picks, the word behind them the items of down. */
template <int K>
__global__ void __launch_bounds__(kOneRowThreads, 1) one_row_step(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t lane = threadIdx.x % 32u, half = threadIdx.x / kThreads, warp = threadIdx.x / 32u % kWarps;
  constexpr uint32_t kRingBytes = kOneRowStages * one_row_stage_bytes(K);
  float* sums = reinterpret_cast<float*>(memory + kHalves * kWarps * kRingBytes);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(sums + 3u * kHalves * kGroups * kBlock);
  uint2* blocks = reinterpret_cast<uint2*>(bytes + kHalves * one_row_input_bytes(args.shape.hidden));
  const SharedInputs inputs = {bytes + half * one_row_input_bytes(args.shape.hidden), blocks + half * (args.shape.hidden / kBlock)};
  const MatrixGeometry inner(args.shape.hidden, args.shape.inter, K, warp / kColumnWarps);
  const MatrixGeometry outer(args.shape.inter, args.shape.hidden, K, warp / kColumnWarps);
  wait_for_previous_kernels();
  let_next_kernel_begin();
  const OneRowPicks picks(args.selection, lane);
  if (picks.count == 0) {
    for (uint32_t i = blockIdx.x * kOneRowThreads + threadIdx.x; args.out != nullptr && i < args.shape.hidden / 4u;
         i += gridDim.x * kOneRowThreads) {
      store_sum(args, 0, i * 4u, {{0.0f, 0.0f, 0.0f, 0.0f}});
    }
    return;
  }
  OneRowRing<K> ring(memory + (half * kWarps + warp) * kRingBytes, args, picks, inner, outer, lane, half, warp % kColumnWarps);
  uint32_t* ready = args.work.inner_arrivals;
  const uint32_t inner_bands = args.inner_bands.divisor, outer_bands = args.outer_bands.divisor;
  if (blockIdx.x < picks.count * inner_bands) one_row_inner<K>(args, picks, ring, inner, ready, sums, inputs);

  float* own = sums + (kHalves + half) * (kGroups * kBlock);
  float* other = own + kHalves * kGroups * kBlock;
  const MatrixParts parts = outer_parts(args.shape);
  uint32_t* passed = args.work.outer_arrivals + outer_bands;
  const uint32_t total = picks.count * outer_bands;
  for (uint32_t item = kHalves * blockIdx.x + half; item < total; item += kHalves * gridDim.x) {
    const uint32_t run = args.outer_bands.divide(item), band = item - run * outer_bands, column = band * kBlock + lane * 4u;
    const uint32_t pick = picks.slot_of(run);
    const uint64_t record = picks.record_of(run);
    uint2 svh = {};
    if (warp == 0) svh = raw_part(record, parts.svh, column);
    wait_for_count(ready + pick, inner_bands, lane);
    ActivationStream<1> stream(args.work.inner_rows, outer, 1, [&](uint32_t) { return pick; }, lane);
    float z[kWarpTiles][1][2];
    multiply_group<K, 1>(ring, stream, outer.num_blocks, args.powers, lane, z);
    store_row(own, warp, lane, z);
    half_barrier(half);
    if (warp == 0) {
      const Four y = finish_with(add_groups(own, 1, 0, lane), svh, record, parts.bias, column, lane);
      store_floats(args.y + static_cast<size_t>(pick) * args.shape.hidden + column, y);
      if (args.out != nullptr && arrive(args.work.outer_arrivals + band, picks.count, lane)) sum_row(args, picks.present, column);
      /* All warps of all items have passed their waits when the last item is counted: the counters are for the next step then. */
      if (lane == 0 && atomicAdd(passed, 1u) == total - 1u) {
        for (uint32_t i = 0; i < args.selection.top_k; ++i) ready[i] = 0;
        *passed = 0;
      }
    }
    float* const swap = own;
    own = other;
    other = swap;
  }
}

}  // namespace glm53

#endif /* GLM53_CUDA_INT_EXPERT_ONE_ROW_CUH_ */
