/* Measurements: how long the way from the device to the host and back takes (moe_cuda.h). No decode step uses this. */
#include <cuda_runtime.h>
#include <time.h>

#include "cpu/error.h"
#include "moe_cuda.h"

namespace glm53 {
namespace {

__device__ uint64_t device_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/* One thread: raises the word, then waits for the same number in `reply`, `rounds` times. cycles[i] is what round i took by the
 * multiprocessor's clock, total_ns what all of them took by the timer, whose steps may be as long as a round. A round beyond the limit ends
 * the kernel with the rest of `cycles` as it was: a device must not spin for ever. */
__global__ void spin_rounds(uint32_t* request, const uint32_t* reply, uint64_t* cycles, uint64_t* total_ns, uint32_t first, uint32_t rounds,
                            uint64_t limit_ns) {
  volatile uint32_t* out = request;
  volatile const uint32_t* in = reply;
  const uint64_t start_ns = device_ns();
  for (uint32_t i = 0; i < rounds; ++i) {
    const uint64_t round_ns = device_ns();
    const long long began = clock64();
    __threadfence_system(); /* as a publication has it before its word */
    *out = first + i;
    while (*in != first + i) {
      if (device_ns() - round_ns > limit_ns) return;
    }
    cycles[i] = static_cast<uint64_t>(clock64() - began);
  }
  *total_ns = device_ns() - start_ns;
}

/* Notes the time; with a word, raises it behind that. */
__global__ void stamp_time(uint64_t* ns, uint32_t* word, uint32_t value) {
  *ns = device_ns();
  if (word == nullptr) return;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(word) = value;
}

int launched() {
  const cudaError_t code = cudaPeekAtLastError();
  return code == cudaSuccess ? 0 : fail("launch of a measuring kernel: %s", cudaGetErrorString(code));
}

uint64_t host_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

void pause_polling() {
  for (int i = 0; i < 8; ++i) {
#if defined(__x86_64__)
    asm volatile("pause");
#endif
  }
}

}  // namespace
}  // namespace glm53

using namespace glm53;

extern "C" int moe_cuda_spin_rounds(uint32_t* request, const uint32_t* reply, uint64_t* cycles, uint64_t* total_ns, uint32_t first,
                                    uint32_t rounds, uint64_t limit_ns, void* stream) {
  if (request == nullptr || reply == nullptr || cycles == nullptr || total_ns == nullptr) return fail("a pointer is NULL");
  spin_rounds<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(request, reply, cycles, total_ns, first, rounds, limit_ns);
  return launched();
}

extern "C" int moe_cuda_stamp(uint64_t* ns, uint32_t* word, uint32_t value, void* stream) {
  if (ns == nullptr) return fail("ns must not be NULL");
  stamp_time<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(ns, word, value);
  return launched();
}

extern "C" int moe_cuda_answer_rounds(const uint32_t* request, uint32_t* reply, uint32_t first, uint32_t rounds, uint64_t limit_ns) {
  if (request == nullptr || reply == nullptr) return fail("request and reply must not be NULL");
  for (uint32_t i = 0; i < rounds; ++i) {
    const uint64_t began_ns = host_ns();
    while (__atomic_load_n(request, __ATOMIC_ACQUIRE) != first + i) {
      if (host_ns() - began_ns > limit_ns) return fail("no request %u of %u: the device has given up, or has not begun", i, rounds);
      pause_polling();
    }
    __atomic_store_n(reply, first + i, __ATOMIC_RELEASE);
  }
  return 0;
}
