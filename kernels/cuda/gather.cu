/* Records from mapped host memory into slots, read by the multiprocessors (moe_cuda.h).
 *
 * Reads over the link take a microsecond or two, so bytes must be under way all the time: a thread has kInFlight loads of 16 bytes before
 * it stores the first of them, and the warps of a block do not wait for each other. One block has 32 KiB under way. At 64 GB/s and 2 us the
 * link wants 128 KiB of them, so a few blocks would do; a quarter of the multiprocessors get one, which leaves decode kernels beside it the
 * others. */
#include <cuda_runtime.h>

#include "cpu/error.h"
#include "moe_cuda.h"

namespace glm53 {
namespace {

constexpr uint32_t kGatherThreads = 256, kInFlight = 8;
constexpr uint32_t kMostCopies = 64;                         /* of one launch: 1 KiB of its arguments */
constexpr uint64_t kMostBytes = UINT64_C(1) << 40;           /* of one range: pieces of a launch are counted by 32 bits */
constexpr uint32_t kWide = 16;                               /* bytes of one load */
constexpr uint32_t kPieceWords = kGatherThreads * kInFlight; /* wide loads of a block at a time */
constexpr uint32_t kShare = 4, kLeastBlocks = 4, kMostBlocks = 32;

struct GatherArgs {
  MoeCudaCopy copies[kMostCopies];
  uint64_t bytes;
  uint32_t pieces; /* of one range: whole and broken ones of kPieceWords loads. 32 bits: dividing by 64 costs a call and registers */
  uint32_t count;
};

/* Nothing reads a record twice here: it need not drive out what L1 holds for a kernel beside this one. */
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

__global__ void __launch_bounds__(kGatherThreads) gather_records(const __grid_constant__ GatherArgs args) {
  const uint64_t wide = args.bytes / kWide;
  const uint32_t total = args.pieces * args.count;
  for (uint32_t at = blockIdx.x; at < total; at += gridDim.x) {
    const MoeCudaCopy copy = args.copies[at / args.pieces];
    const uint64_t piece = at % args.pieces, first = piece * kPieceWords + threadIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(copy.source);
    uint4* to = reinterpret_cast<uint4*>(copy.to);
    if ((piece + 1) * kPieceWords <= wide) {
      uint4 held[kInFlight];
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) held[i] = load_once(from + first + i * kGatherThreads);
#pragma unroll
      for (uint32_t i = 0; i < kInFlight; ++i) to[first + i * kGatherThreads] = held[i];
      continue;
    }
    for (uint64_t i = first; i < wide; i += kGatherThreads) to[i] = load_once(from + i);
    for (uint64_t i = wide * kWide + threadIdx.x; i < args.bytes; i += kGatherThreads) {
      reinterpret_cast<uint8_t*>(copy.to)[i] = reinterpret_cast<const uint8_t*>(copy.source)[i];
    }
  }
}

/* Blocks of a launch on the thread's device. */
int gather_blocks(uint32_t pieces, uint32_t* blocks) {
  int device = 0, multiprocessors = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (code != cudaSuccess) return fail("a gather finds no device: %s", cudaGetErrorString(code));
  uint32_t most = static_cast<uint32_t>(multiprocessors) / kShare;
  most = most < kLeastBlocks ? kLeastBlocks : most > kMostBlocks ? kMostBlocks : most;
  *blocks = pieces < most ? pieces : most;
  return 0;
}

}  // namespace
}  // namespace glm53

using namespace glm53;

extern "C" int moe_cuda_gather(const MoeCudaCopy* copies, uint32_t count, uint64_t bytes, void* stream) {
  if (copies == nullptr || count == 0 || bytes == 0) return fail("a gather of nothing: copies, count and bytes must not be 0");
  if (bytes > kMostBytes) return fail("a gather of ranges of more than 1 TiB");
  for (uint32_t i = 0; i < count; ++i) {
    if (copies[i].to == 0 || copies[i].source == 0) return fail("copies[%u] has no address", i);
    if (copies[i].to % kWide != 0 || copies[i].source % kWide != 0) return fail("copies[%u] is not 16-byte aligned", i);
  }
  GatherArgs args;
  args.bytes = bytes;
  args.pieces =
      static_cast<uint32_t>(bytes / kWide / kPieceWords) + 1; /* the last one may be empty: it has the bytes behind the wide loads */
  for (uint32_t first = 0; first < count; first += kMostCopies) {
    args.count = count - first < kMostCopies ? count - first : kMostCopies;
    for (uint32_t i = 0; i < args.count; ++i) args.copies[i] = copies[first + i];
    uint32_t blocks = 0;
    if (gather_blocks(args.pieces * args.count, &blocks) != 0) return -1;
    gather_records<<<blocks, kGatherThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    const cudaError_t code = cudaGetLastError();
    if (code != cudaSuccess) return fail("launch of a gather: %s", cudaGetErrorString(code));
  }
  return 0;
}
