/* The kernels of a decode step: prepare (steps 1 to 3 of gate and up), inner (gate and up, activation, steps 1 to 3 of down), outer (down
 * and the weighted sum). Whoever arrives last at a counter goes on with what the others left in memory; the order of every sum is fixed, so
 * it does not matter who that is.
 */
#ifndef GLM53_CUDA_INT_EXPERT_KERNELS_CUH_
#define GLM53_CUDA_INT_EXPERT_KERNELS_CUH_

#include "cuda/int_expert_band.cuh"
#include "cuda/int_expert_runs.cuh"

namespace glm53 {

/* Kernels of a step that hand out items: inner (two launches when gate and up differ in K) and outer. */
constexpr uint32_t kLoopingKernels = 3;

/* Scratch memory in VRAM. A projection row is pick * projections + projection (0 = gate, or up when there is no gate; 1 = up). */
struct Workspace {
  QuantisedRows inputs;     /* [picks * projections] of hidden */
  QuantisedRows inner_rows; /* [picks] of inter */
  float* projections;       /* [picks * projections][inter] gate and up after step 6 */
  float* y;                 /* [picks][hidden] */
  uint32_t* inner_arrivals; /* [picks][inter / 128], 0 between steps */
  uint32_t* outer_arrivals; /* [MOE_CUDA_MAX_ROWS][hidden / 128], 0 between steps */
  uint32_t* handed_out;     /* [kLoopingKernels] items that each kernel of a step has given to its blocks; prepare_rows sets them to 0 */
  RunTable* runs;           /* what outer reads; inner begins too early for it */
};

/* Division by a number that is the same for a whole launch. Exact for numbers and divisors below 2^16: the error of the rounded reciprocal,
 * less than divisor / 2^32, then never reaches the next quotient. */
struct Divisor {
  uint32_t divisor, reciprocal;

  __host__ explicit Divisor(uint32_t d) : divisor(d), reciprocal(static_cast<uint32_t>(((1ull << 32) + d - 1u) / d)) {}
  Divisor() = default;
  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return divisor == 1 ? n : __umulhi(n, reciprocal); }
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
  uint32_t rows, run_rows, projections, x_dtype, weights_dtype;
  Divisor inner_bands, outer_bands;
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

/* Brings the lane's four numbers of a part into the L2 cache, for an epilogue. */
__device__ __forceinline__ void prefetch_part(uint64_t record, uint32_t part, uint32_t index) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const __half*>(record + part) + index));
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

/* One warp per (pick, projection, block of 128 inputs), then one per (row, block of 128 outputs) for rows without a pick; and one more
 * block for what the other kernels count with. */
__global__ void __launch_bounds__(kThreads) prepare_rows(const __grid_constant__ StepArgs args) {
  wait_for_previous_kernels();
  let_next_kernel_begin(); /* not before the selection is final: the next kernel reads it at once */
  const uint32_t lane = threadIdx.x % 32u, blocks = args.shape.hidden / kBlock;
  const uint32_t item = (blockIdx.x * kThreads + threadIdx.x) / 32u;
  const uint32_t block = item % blocks, row = item / blocks, prepared = args.selection.picks * args.projections;
  const uint32_t column = block * kBlock + lane * 4u;
  if (blockIdx.x == gridDim.x - 1) { /* the last block has no rows */
    __shared__ RunTable table;
    if (threadIdx.x < kLoopingKernels) args.work.handed_out[threadIdx.x] = 0;
    table.build(args.selection, args.run_rows);
    table.store(args.work.runs);
  } else if (row < prepared) {
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

/* A band of a run. */
struct RunBand {
  uint32_t run, band;
};

/* A kernel's items, and the next one that this block will fetch weights for. An item is (run, band, projection), the projection fastest. */
struct InnerItems {
  const RunTable& table;
  const MoeExpertShape& shape;
  Divisor bands;
  uint32_t upcoming, total, first_projection, launched_projections, projections, tile_bytes;

  __device__ __forceinline__ uint32_t projection(uint32_t i) const { return first_projection + (i & (launched_projections - 1u)); }
  __device__ __forceinline__ RunBand place(uint32_t i) const {
    const uint32_t pair = i >> (launched_projections - 1u), run = bands.divide(pair);
    return {run, pair - run * bands.divisor};
  }
  /* The address of the upcoming item's band in its matrix. */
  __device__ __forceinline__ bool next(const uint8_t*& band) {
    if (upcoming >= total) return false;
    const MatrixParts parts = projection_parts(shape, projections, projection(upcoming));
    const RunBand at = place(upcoming);
    band = reinterpret_cast<const uint8_t*>(table.record[at.run] + parts.trellis) + at.band * (kBlock / 16u) * tile_bytes;
    upcoming += gridDim.x;
    return true;
  }
};

struct OuterItems {
  const RunTable& table;
  Divisor bands;
  uint32_t upcoming, total, trellis, tile_bytes;

  __device__ __forceinline__ RunBand place(uint32_t i) const {
    const uint32_t run = bands.divide(i);
    return {run, i - run * bands.divisor};
  }
  __device__ __forceinline__ bool next(const uint8_t*& band) {
    if (upcoming >= total) return false;
    const RunBand at = place(upcoming);
    band = reinterpret_cast<const uint8_t*>(table.record[at.run] + trellis) + at.band * (kBlock / 16u) * tile_bytes;
    upcoming += gridDim.x;
    return true;
  }
};

/* The order in which a block takes items: blockIdx, blockIdx + grid, and from then on, in a launch with long items, whatever nobody has
 * taken yet: blocks do not run at the same pace. The request is made two items ahead, so that neither its latency nor a barrier of its own
 * is paid for. Short items, of which the ring would fetch several ahead, keep the fixed stride. */
class ItemOrder {
 public:
  /* later: shared memory for two numbers. */
  __device__ __forceinline__ ItemOrder(uint32_t* handed_out, uint32_t* later, bool dynamic)
      : item(blockIdx.x), next(blockIdx.x + gridDim.x), handed_out_(handed_out), later_(later), dynamic_(dynamic) {}

  uint32_t item, next, turn = 0;

  /* Before the item's work. */
  __device__ __forceinline__ void request() {
    answer_ = next + gridDim.x;
    if (dynamic_ && threadIdx.x == 0) answer_ = 2u * gridDim.x + atomicAdd(handed_out_, 1u);
  }
  /* After it, before and after the barrier that ends it. */
  __device__ __forceinline__ void publish() {
    if (threadIdx.x == 0) later_[turn % 2u] = answer_;
  }
  __device__ __forceinline__ void advance() {
    item = next;
    next = later_[turn % 2u];
    ++turn;
  }
  __device__ __forceinline__ bool dynamic() const { return dynamic_; }

 private:
  uint32_t* handed_out_;
  uint32_t* later_;
  uint32_t answer_ = 0;
  bool dynamic_;
};

/* True when every warp's group of input blocks is as long as the others and holds at least what a ring fetches ahead. */
__device__ __forceinline__ bool long_items(uint32_t in_features, uint32_t stages) {
  const uint32_t blocks = in_features / kBlock;
  return blocks % kGroups == 0 && blocks / kGroups * kBlockStages >= stages;
}

/* The groups' sums of one item, from all warps, in the reduction buffer. Rows: of the buffer; size: of the run. */
template <int K, int Rows, typename Ring, typename RowOf>
__device__ __forceinline__ void multiply_item(Ring& ring, const QuantisedRows& from, const MatrixGeometry& geometry, uint32_t size,
                                              RowOf row_of, const PowersOfTwo& powers, float* buffer) {
  const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
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
}

/* Step 7 and steps 1 to 3 of down for one band of a pick whose projections are all in memory. */
__device__ __forceinline__ void finish_inner(const StepArgs& args, uint64_t record, uint32_t pick, uint32_t band, uint32_t lane) {
  const MoeExpertShape& s = args.shape;
  const uint32_t column = band * kBlock + lane * 4u;
  const float* first = args.work.projections + static_cast<size_t>(pick) * args.projections * s.inter + column;
  const Four suh = part_halves(record, s.down_suh, column);
  Four a = load_floats(first);
  if (args.projections == 2) {
    const Four u = load_floats(first + s.inter);
    activate(s.activation, s.act_limit, a, &u);
  } else {
    activate(s.activation, s.act_limit, a, nullptr);
  }
  a = times(a, suh);
  hadamard128(a, lane);
  store_quantised(args.work.inner_rows, pick, s.inter, band, quantise(a), lane);
}

/* Gate and up of all runs (or one of them: projections first .. first + launched - 1, when their K differ). Rows: of a run, 4 or 8. */
template <int K, int Rows>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    inner_bands(const __grid_constant__ StepArgs args, uint32_t first, uint32_t launched) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ RunTable table;
  __shared__ uint32_t later[2];
  const uint32_t runs = table.build(args.selection, Rows);
  const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, bands = args.inner_bands.divisor;
  constexpr BlockMemory kMemory = block_memory(kRoomy, K, Rows);
  using Ring = WeightRing<K, kMemory.stages, InnerItems>;
  const MatrixGeometry geometry(args.shape.hidden, args.shape.inter, K, warp / kColumnWarps);
  const InnerItems items = {table, args.shape, args.inner_bands, blockIdx.x, runs * bands * launched,
                            first, launched,   args.projections, 32u * K};
  float* reductions = reinterpret_cast<float*>(memory + kWarps * kMemory.stages * Ring::kStageBytes);
  Ring ring(memory + warp * kMemory.stages * Ring::kStageBytes, geometry, items, lane, warp % kColumnWarps);
  wait_for_previous_kernels();
  let_next_kernel_begin(); /* not earlier: it reads the run table at once */
  ItemOrder order(args.work.handed_out + first, later, long_items(args.shape.hidden, kMemory.stages));
  while (order.item < items.total) {
    const RunBand at = items.place(order.item);
    const uint32_t projection = items.projection(order.item), size = table.sizes[at.run];
    const auto row_of = [&](uint32_t r) { return table.picks[at.run][r] * args.projections + projection; };
    float* sums = reductions + order.turn % kMemory.reductions * (kGroups * Rows * kBlock);
    if constexpr (kMemory.reductions == 1) __syncthreads(); /* the previous item's sums have been read */
    if (order.dynamic()) ring.set_upcoming(order.next);
    order.request();
    if (warp == 0) {
      const uint32_t column = at.band * kBlock + lane * 4u;
      prefetch_part(table.record[at.run], projection_parts(args.shape, args.projections, projection).svh, column);
      prefetch_part(table.record[at.run], args.shape.down_suh, column);
    }
    multiply_item<K, Rows>(ring, args.work.inputs, geometry, size, row_of, args.powers, sums);
    order.publish();
    __syncthreads();
    order.advance();
    if (warp < size) {
      const uint32_t pick = table.picks[at.run][warp], column = at.band * kBlock + lane * 4u;
      const uint64_t record = table.record[at.run];
      const MatrixParts parts = projection_parts(args.shape, args.projections, projection);
      const Four y = finish(add_groups(sums, Rows, warp, lane), record, parts, column, lane);
      store_floats(args.work.projections + (static_cast<size_t>(pick) * args.projections + projection) * args.shape.inter + column, y);
      if (arrive(args.work.inner_arrivals + pick * bands + at.band, args.projections, lane))
        finish_inner(args, record, pick, at.band, lane);
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
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) outer_bands(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ RunTable table;
  __shared__ uint32_t later[2];
  let_next_kernel_begin();
  const uint32_t runs = table.load(args.work.runs);
  const uint32_t lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, bands = args.outer_bands.divisor;
  constexpr BlockMemory kMemory = block_memory(kRoomy, K, Rows);
  using Ring = WeightRing<K, kMemory.stages, OuterItems>;
  const MatrixGeometry geometry(args.shape.inter, args.shape.hidden, K, warp / kColumnWarps);
  const OuterItems items = {table, args.outer_bands, blockIdx.x, runs * bands, args.shape.down_trellis, 32u * K};
  float* reductions = reinterpret_cast<float*>(memory + kWarps * kMemory.stages * Ring::kStageBytes);
  Ring ring(memory + warp * kMemory.stages * Ring::kStageBytes, geometry, items, lane, warp % kColumnWarps);
  wait_for_previous_kernels();
  const MatrixParts parts = outer_parts(args.shape);
  ItemOrder order(args.work.handed_out + kLoopingKernels - 1u, later, long_items(args.shape.inter, kMemory.stages));
  while (order.item < items.total) {
    const RunBand at = items.place(order.item);
    const uint32_t size = table.sizes[at.run];
    const auto row_of = [&](uint32_t r) { return static_cast<uint32_t>(table.picks[at.run][r]); };
    float* sums = reductions + order.turn % kMemory.reductions * (kGroups * Rows * kBlock);
    if constexpr (kMemory.reductions == 1) __syncthreads(); /* the previous item's sums have been read */
    if (order.dynamic()) ring.set_upcoming(order.next);
    order.request();
    if (warp == 0) prefetch_part(table.record[at.run], parts.svh, at.band * kBlock + lane * 4u);
    multiply_item<K, Rows>(ring, args.work.inner_rows, geometry, size, row_of, args.powers, sums);
    order.publish();
    __syncthreads();
    order.advance();
    if (warp < size) {
      const uint32_t pick = table.picks[at.run][warp], column = at.band * kBlock + lane * 4u;
      const Four y = finish(add_groups(sums, Rows, warp, lane), table.record[at.run], parts, column, lane);
      store_floats(args.y + static_cast<size_t>(pick) * args.shape.hidden + column, y);
      if (args.out == nullptr) continue;
      const uint32_t row = pick / args.selection.top_k;
      uint32_t computed = 0;
      for (uint32_t k = 0; k < args.selection.top_k; ++k) computed += table.expert[row * args.selection.top_k + k] >= 0;
      if (arrive(args.work.outer_arrivals + row * bands + at.band, computed, lane)) sum_picks(args, table, row, column);
    }
  }
}

/* One thread per four columns of a row. */
struct CombineArgs {
  Selection selection;
  const void* weights;
  const float* y;
  const float* other_y;
  const uint64_t* other_from;
  const float* shared;
  float* out;
  uint32_t hidden, rows, weights_dtype;
};

/* Another processor has written this memory just before: nothing of it may come from a cache. */
__device__ __forceinline__ Four load_floats_from_host(const float* from) {
  const float4 v = __ldcv(reinterpret_cast<const float4*>(from));
  return {{v.x, v.y, v.z, v.w}};
}

__global__ void __launch_bounds__(kThreads) combine_picks(const __grid_constant__ CombineArgs args) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, quads = args.hidden / 4u;
  const uint32_t row = thread / quads, column = thread % quads * 4u;
  if (row >= args.rows) return;
  Four sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
  const float* other = args.other_y;
  bool asked = args.other_from == nullptr;
  for (uint32_t k = 0; k < args.selection.top_k; ++k) {
    const uint32_t pick = row * args.selection.top_k + k;
    const int32_t e = args.selection.expert(pick);
    if (e < 0) continue;
    const bool here = args.selection.records[e] != 0;
    if (!here && !asked) { /* only where it is needed: this read crosses the link */
      asked = true;
      other = reinterpret_cast<const float*>(__ldcv(reinterpret_cast<const unsigned long long*>(args.other_from)));
    }
    const float* from = here ? args.y : other;
    if (from == nullptr) continue;
    const float weight = args.weights_dtype == MOE_DTYPE_F16 ? __half2float(static_cast<const __half*>(args.weights)[pick])
                                                             : static_cast<const float*>(args.weights)[pick];
    const float* at_pick = from + static_cast<size_t>(pick) * args.hidden + column;
    const Four y = here ? load_floats(at_pick) : load_floats_from_host(at_pick);
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
