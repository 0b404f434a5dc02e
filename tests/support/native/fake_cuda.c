/* A driver without a device for tests of cuda_waits.c; the functions that matter note that they really ran. */
#include <stdint.h>
#include <string.h>

static long ran[8];
__attribute__((visibility("default"))) long fake_ran(int i) { return ran[i]; }

__attribute__((visibility("default"))) int cuStreamSynchronize(void* stream) {
  ran[0] += (long)(intptr_t)stream;
  return 0;
}
__attribute__((visibility("default"))) int cuMemAlloc_v2(void** out, uint64_t bytes) {
  *out = (void*)(intptr_t)bytes;
  ++ran[1];
  return 0;
}
__attribute__((visibility("default"))) int cuMemcpyDtoH_v2(void* to, uint64_t from, uint64_t bytes) {
  ran[2] += (long)bytes + (long)from + (to != 0);
  return 7;
}
__attribute__((visibility("default"))) int cuLaunchKernel(void) {
  ++ran[3];
  return 0;
}
__attribute__((visibility("default"))) int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
/* No device: whoever asks for one goes no further. */
static int anything(void) { return 100; }

__attribute__((visibility("default"))) int cuGetProcAddress_v2(const char* name, void** out, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  *out = (void*)anything;
  if (strcmp(name, "cuStreamSynchronize") == 0) *out = (void*)cuStreamSynchronize;
  if (strcmp(name, "cuMemAlloc") == 0) *out = (void*)cuMemAlloc_v2;
  if (strcmp(name, "cuMemcpyDtoH") == 0) *out = (void*)cuMemcpyDtoH_v2;
  if (strcmp(name, "cuLaunchKernel") == 0) *out = (void*)cuLaunchKernel;
  if (strcmp(name, "cuDriverGetVersion") == 0) *out = (void*)cuDriverGetVersion;
  if (strcmp(name, "cuGetProcAddress") == 0) *out = (void*)cuGetProcAddress_v2;
  if (status != 0) *status = 0;
  return 0;
}
