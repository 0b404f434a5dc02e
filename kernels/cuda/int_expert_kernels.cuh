/* The kernels of a decode step: prepare (steps 1 to 3 of gate and up), inner (gate and up, activation, steps 1 to 3 of down), outer (down
 * and the weighted sum). Whoever arrives last at a counter goes on with what the others left in memory; the order of every sum is fixed, so
 * it does not matter who that is.
 */
#ifndef GLM53_CUDA_INT_EXPERT_KERNELS_CUH_
#define GLM53_CUDA_INT_EXPERT_KERNELS_CUH_

#include "cuda/int_expert_band.cuh"
#include "cuda/int_expert_runs.cuh"

namespace glm53 {

/* Scratch memory in VRAM. A projection row is pick * projections + projection (0 = gate, or up when there is no gate; 1 = up). */
struct Workspace {
  QuantisedRows inputs;     /* [picks * projections] of hidden */
  QuantisedRows inner_rows; /* [picks] of inter */
  float* projections;       /* [picks * projections][inter] gate and up after step 6 */
  float* y;                 /* [picks][hidden] */
  uint32_t* inner_arrivals; /* [picks][inter / 128], 0 between steps */
  uint32_t* outer_arrivals; /* [MOE_CUDA_MAX_ROWS][hidden / 128], 0 between steps */
};

struct StepArgs {
  Selection selection;
  MoeExpertShape shape;
  const void* x;
  const void* weights;
  const float* shared;
  float* y;
  float* out;
  Workspace work;
  uint32_t rows, projections, x_dtype, weights_dtype;
  PowersOfTwo powers;
};

/* Where the parts of one matrix lie in a record. */
struct MatrixParts {
  uint32_t trellis, suh, svh, bias;
};

__device__ __forceinline__ MatrixParts projection_parts(const MoeExpertShape& s, uint32_t projections, uint32_t projection) {
  if (projections == 2 && projection == 0) return {s.gate_trellis, s.gate_suh, s.gate_svh, s.gate_bias};
  return {s.up_trellis, s.up_suh, s.up_svh, s.up_bias};
}
__device__ __forceinline__ MatrixParts outer_parts(const MoeExpertShape& s) {
  return {s.down_trellis, s.down_suh, s.down_svh, s.down_bias};
}

__device__ __forceinline__ Four part_halves(uint64_t record, uint32_t part, uint32_t index) {
  return load_halves(reinterpret_cast<const __half*>(record + part) + index);
}

/* Programmatic dependent launch: the next kernel may begin; the previous ones have ended and their writes are visible. */
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* A warp's arrival at a counter, after its stores. True for the last of `expected`, which then sees the others' stores. */
__device__ __forceinline__ bool arrive(uint32_t* counter, uint32_t expected, uint32_t lane) {
  __threadfence();
  __syncwarp();
  uint32_t before = 0;
  if (lane == 0) before = atomicAdd(counter, 1u);
  before = __shfl_sync(kFullWarp, before, 0);
  if (before != expected - 1u) return false;
  if (lane == 0) *counter = 0;
  __threadfence();
  return true;
}

__device__ __forceinline__ float weight_of(const StepArgs& args, uint32_t pick) {
  if (args.weights_dtype == MOE_DTYPE_F16) return __half2float(static_cast<const __half*>(args.weights)[pick]);
  return static_cast<const float*>(args.weights)[pick];
}

__device__ __forceinline__ void store_sum(const StepArgs& args, uint32_t row, uint32_t column, Four sum) {
  const size_t at = static_cast<size_t>(row) * args.shape.hidden + column;
  if (args.shared != nullptr) {
    const float4 more = *reinterpret_cast<const float4*>(args.shared + at);
    sum = {{sum.v[0] + more.x, sum.v[1] + more.y, sum.v[2] + more.z, sum.v[3] + more.w}};
  }
  store_floats(args.out + at, sum);
}

/* Steps 6: the lane's four columns of a row. */
__device__ __forceinline__ Four finish(Four z, uint64_t record, const MatrixParts& parts, uint32_t column, uint32_t lane) {
  const Four svh = part_halves(record, parts.svh, column);
  hadamard128(z, lane);
  Four y = times(z, svh);
  if (parts.bias != MOE_ABSENT) {
    const Four bias = part_halves(record, parts.bias, column);
#pragma unroll
    for (int i = 0; i < 4; ++i) y.v[i] += bias.v[i];
  }
  return y;
}

/* One warp per (pick, projection, block of 128 inputs), then one per (row, block of 128 outputs) for rows without a pick. */
__global__ void __launch_bounds__(kThreads) prepare_rows(const __grid_constant__ StepArgs args) {
  wait_for_previous_kernels();
  let_next_kernel_begin(); /* not before the selection is final: the next kernel reads it at once */
  const uint32_t lane = threadIdx.x % 32u, blocks = args.shape.hidden / kBlock;
  const uint32_t item = (blockIdx.x * kThreads + threadIdx.x) / 32u;
  const uint32_t block = item % blocks, row = item / blocks, prepared = args.selection.picks * args.projections;
  const uint32_t column = block * kBlock + lane * 4u;
  if (row < prepared) {
    const uint32_t pick = row / args.projections;
    const uint64_t record = args.selection.record(pick);
    if (record == 0) return;
    const MatrixParts parts = projection_parts(args.shape, args.projections, row % args.projections);
    const size_t at = static_cast<size_t>(pick / args.selection.top_k) * args.shape.hidden + column;
    Four h = args.x_dtype == MOE_DTYPE_F16 ? load_halves(static_cast<const __half*>(args.x) + at)
                                           : load_floats(static_cast<const float*>(args.x) + at);
    h = times(h, part_halves(record, parts.suh, column));
    hadamard128(h, lane);
    store_quantised(args.work.inputs, row, args.shape.hidden, block, quantise(h), lane);
  } else if (args.out != nullptr && row - prepared < args.rows) {
    const uint32_t token = row - prepared, first = token * args.selection.top_k;
    for (uint32_t k = 0; k < args.selection.top_k; ++k) {
      if (args.selection.record(first + k) != 0) return;
    }
    store_sum(args, token, column, {{0.0f, 0.0f, 0.0f, 0.0f}});
  }
}

/* The work items of a block: item, item + grid, ... below `total`. An item is (run, band, projection), the projection fastest. */
struct InnerItems {
  const RunTable& table;
  const MoeExpertShape& shape;
  uint32_t item, total, bands, first_projection, launched_projections, projections, tile_bytes;

  __device__ __forceinline__ uint32_t projection(uint32_t i) const { return first_projection + i % launched_projections; }
  __device__ __forceinline__ uint32_t band(uint32_t i) const { return i / launched_projections % bands; }
  __device__ __forceinline__ uint32_t run(uint32_t i) const { return i / (launched_projections * bands); }
  /* The address of the next item's band in its matrix. */
  __device__ __forceinline__ bool next(const uint8_t*& matrix) {
    if (item >= total) return false;
    const MatrixParts parts = projection_parts(shape, projections, projection(item));
    matrix = reinterpret_cast<const uint8_t*>(table.record[run(item)] + parts.trellis) + band(item) * (kBlock / 16u) * tile_bytes;
    item += gridDim.x;
    return true;
  }
};

struct OuterItems {
  const RunTable& table;
  uint32_t item, total, bands, trellis, tile_bytes;

  __device__ __forceinline__ bool next(const uint8_t*& matrix) {
    if (item >= total) return false;
    matrix = reinterpret_cast<const uint8_t*>(table.record[item / bands] + trellis) + item % bands * (kBlock / 16u) * tile_bytes;
    item += gridDim.x;
    return true;
  }
};

/* The groups' sums of one item, from all warps, in the reduction buffer of `turn`. Rows: of the buffer; size: of the run. */
template <int K, int Rows, typename Ring, typename RowOf>
__device__ __forceinline__ const float* multiply_item(Ring& ring, const QuantisedRows& from, const MatrixGeometry& geometry, uint32_t size,
                                                      RowOf row_of, const PowersOfTwo& powers, float* reductions, uint32_t turn) {
  constexpr uint32_t kReductions = block_memory(kRoomy, K, Rows).reductions;
  const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  float* buffer = reductions + turn % kReductions * (kGroups * Rows * kBlock);
  if constexpr (kReductions == 1) __syncthreads(); /* the previous item has been read */
  if (Rows == 4 || size <= 4) {
    ActivationStream<1> stream(from, geometry, size, row_of, lane);
    float z[kWarpTiles][1][2];
    multiply_group<K, 1>(ring, stream, geometry.num_blocks, powers, lane, z);
    store_group<1>(buffer, Rows, warp, lane, z);
  } else if constexpr (Rows == 8) {
    ActivationStream<2> stream(from, geometry, size, row_of, lane);
    float z[kWarpTiles][2][2];
    multiply_group<K, 2>(ring, stream, geometry.num_blocks, powers, lane, z);
    store_group<2>(buffer, Rows, warp, lane, z);
  }
  __syncthreads();
  return buffer;
}

/* Step 7 and steps 1 to 3 of down for one band of a pick whose projections are all in memory. */
__device__ __forceinline__ void finish_inner(const StepArgs& args, uint64_t record, uint32_t pick, uint32_t band, uint32_t lane) {
  const MoeExpertShape& s = args.shape;
  const uint32_t column = band * kBlock + lane * 4u;
  const float* first = args.work.projections + static_cast<size_t>(pick) * args.projections * s.inter + column;
  const Four suh = part_halves(record, s.down_suh, column);
  const Four g = load_floats(first);
  Four a;
  if (args.projections == 2) {
    const Four u = load_floats(first + s.inter);
#pragma unroll
    for (int i = 0; i < 4; ++i) a.v[i] = activate(s.activation, s.act_limit, g.v[i], u.v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.v[i] = activate_gate(s.activation, s.act_limit, g.v[i]);
  }
  a = times(a, suh);
  hadamard128(a, lane);
  store_quantised(args.work.inner_rows, pick, s.inter, band, quantise(a), lane);
}

/* Gate and up of all runs (or one of them: projections first .. first + launched - 1, when their K differ). Rows: of a run, 4 or 8. */
template <int K, int Rows>
__global__ void __launch_bounds__(kThreads, 2) inner_bands(const __grid_constant__ StepArgs args, uint32_t first, uint32_t launched) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ RunTable table;
  let_next_kernel_begin();
  const uint32_t runs = table.build(args.selection, Rows);
  const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, bands = args.shape.inter / kBlock;
  constexpr BlockMemory kMemory = block_memory(kRoomy, K, Rows);
  using Ring = WeightRing<K, kMemory.stages, InnerItems>;
  const MatrixGeometry geometry(args.shape.hidden, args.shape.inter, K, warp / kColumnWarps);
  const InnerItems items = {table, args.shape, blockIdx.x, runs * bands * launched, bands, first, launched, args.projections, 32u * K};
  float* reductions = reinterpret_cast<float*>(memory + kWarps * kMemory.stages * Ring::kStageBytes);
  Ring ring(memory + warp * kMemory.stages * Ring::kStageBytes, geometry, items, lane, warp % kColumnWarps);
  wait_for_previous_kernels();
  for (uint32_t item = blockIdx.x, turn = 0; item < items.total; item += gridDim.x, ++turn) {
    const uint32_t run = items.run(item), band = items.band(item), projection = items.projection(item), size = table.sizes[run];
    const auto row_of = [&](uint32_t r) { return table.picks[run][r] * args.projections + projection; };
    const float* sums = multiply_item<K, Rows>(ring, args.work.inputs, geometry, size, row_of, args.powers, reductions, turn);
    if (warp < size) {
      const uint32_t pick = table.picks[run][warp], column = band * kBlock + lane * 4u;
      const uint64_t record = table.record[run];
      const MatrixParts parts = projection_parts(args.shape, args.projections, projection);
      const Four y = finish(add_groups(sums, Rows, warp, lane), record, parts, column, lane);
      store_floats(args.work.projections + (static_cast<size_t>(pick) * args.projections + projection) * args.shape.inter + column, y);
      if (arrive(args.work.inner_arrivals + pick * bands + band, args.projections, lane)) finish_inner(args, record, pick, band, lane);
    }
  }
}

/* Step 8 for one band of a row whose picks are all in memory. */
__device__ __forceinline__ void sum_picks(const StepArgs& args, const RunTable& table, uint32_t row, uint32_t column) {
  const uint32_t top_k = args.selection.top_k;
  Four sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 4
  for (uint32_t k = 0; k < top_k; ++k) {
    const uint32_t pick = row * top_k + k;
    if (table.expert[pick] < 0) continue;
    const float weight = weight_of(args, pick);
    const Four y = load_floats(args.y + static_cast<size_t>(pick) * args.shape.hidden + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.v[i] = fmaf(weight, y.v[i], sum.v[i]);
  }
  store_sum(args, row, column, sum);
}

/* Down of all runs, and the sum over a row's picks. */
template <int K, int Rows>
__global__ void __launch_bounds__(kThreads, 2) outer_bands(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ RunTable table;
  const uint32_t runs = table.build(args.selection, Rows);
  const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, bands = args.shape.hidden / kBlock;
  constexpr BlockMemory kMemory = block_memory(kRoomy, K, Rows);
  using Ring = WeightRing<K, kMemory.stages, OuterItems>;
  const MatrixGeometry geometry(args.shape.inter, args.shape.hidden, K, warp / kColumnWarps);
  const OuterItems items = {table, blockIdx.x, runs * bands, bands, args.shape.down_trellis, 32u * K};
  float* reductions = reinterpret_cast<float*>(memory + kWarps * kMemory.stages * Ring::kStageBytes);
  Ring ring(memory + warp * kMemory.stages * Ring::kStageBytes, geometry, items, lane, warp % kColumnWarps);
  wait_for_previous_kernels();
  const MatrixParts parts = outer_parts(args.shape);
  for (uint32_t item = blockIdx.x, turn = 0; item < items.total; item += gridDim.x, ++turn) {
    const uint32_t run = item / bands, band = item % bands, size = table.sizes[run];
    const auto row_of = [&](uint32_t r) { return static_cast<uint32_t>(table.picks[run][r]); };
    const float* sums = multiply_item<K, Rows>(ring, args.work.inner_rows, geometry, size, row_of, args.powers, reductions, turn);
    if (warp < size) {
      const uint32_t pick = table.picks[run][warp], column = band * kBlock + lane * 4u;
      const Four y = finish(add_groups(sums, Rows, warp, lane), table.record[run], parts, column, lane);
      store_floats(args.y + static_cast<size_t>(pick) * args.shape.hidden + column, y);
      if (args.out == nullptr) continue;
      const uint32_t row = pick / args.selection.top_k;
      uint32_t computed = 0;
      for (uint32_t k = 0; k < args.selection.top_k; ++k) computed += table.expert[row * args.selection.top_k + k] >= 0;
      if (arrive(args.work.outer_arrivals + row * bands + band, computed, lane)) sum_picks(args, table, row, column);
    }
  }
}

/* One thread per four columns of a row. */
struct CombineArgs {
  Selection selection;
  const void* weights;
  const float* y;
  const float* other_y;
  const float* shared;
  float* out;
  uint32_t hidden, rows, weights_dtype;
};

__global__ void __launch_bounds__(kThreads) combine_picks(const __grid_constant__ CombineArgs args) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, quads = args.hidden / 4u;
  const uint32_t row = thread / quads, column = thread % quads * 4u;
  if (row >= args.rows) return;
  Four sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  for (uint32_t k = 0; k < args.selection.top_k; ++k) {
    const uint32_t pick = row * args.selection.top_k + k;
    const int32_t e = args.selection.expert(pick);
    if (e < 0) continue;
    const float* from = args.selection.records[e] != 0 ? args.y : args.other_y;
    if (from == nullptr) continue;
    const float weight = args.weights_dtype == MOE_DTYPE_F16 ? __half2float(static_cast<const __half*>(args.weights)[pick])
                                                             : static_cast<const float*>(args.weights)[pick];
    const Four y = load_floats(from + static_cast<size_t>(pick) * args.hidden + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.v[i] = fmaf(weight, y.v[i], sum.v[i]);
  }
  const size_t at = static_cast<size_t>(row) * args.hidden + column;
  if (args.shared != nullptr) {
    const Four more = load_floats(args.shared + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.v[i] += more.v[i];
  }
  store_floats(args.out + at, sum);
}

}  // namespace glm53

#endif /* GLM53_CUDA_INT_EXPERT_KERNELS_CUH_ */
