#include "cuda/device_driver.h"

#include <dlfcn.h>

#include "cuda/slot_memory.h"
#include "tier/error.h"

namespace glm53 {
namespace {

template <typename Function>
Function* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) throw Error(GLM53_SYSTEM, format("libcuda.so.1 has no %s: the GPU driver is too old", name));
  return reinterpret_cast<Function*>(found);
}

void* open_library() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw Error(GLM53_SYSTEM, format("libcuda.so.1 cannot be loaded: %s", dlerror()));
  return library;
}

PagerDriver load() {
  void* library = open_library();
  PagerDriver driver{};
  driver.context_get = symbol<int(void**)>(library, "cuCtxGetCurrent");
  driver.context_set = symbol<int(void*)>(library, "cuCtxSetCurrent");
  driver.copy_to_host = symbol<int(void*, uint64_t, size_t, void*)>(library, "cuMemcpyDtoHAsync_v2");
  driver.copy_to_device = symbol<int(uint64_t, const void*, size_t, void*)>(library, "cuMemcpyHtoDAsync_v2");
  driver.write_word = symbol<int(void*, uint64_t, uint32_t, uint32_t)>(library, "cuStreamWriteValue32_v2");
  driver.wait_word = symbol<int(void*, uint64_t, uint32_t, uint32_t)>(library, "cuStreamWaitValue32_v2");
  return driver;
}

SlotMemoryDriver load_slot_memory() {
  void* library = open_library();
  SlotMemoryDriver driver{};
  driver.granularity = symbol<int(size_t*, const SlotMemoryKind*, int)>(library, "cuMemGetAllocationGranularity");
  driver.reserve = symbol<int(uint64_t*, size_t, size_t, uint64_t, unsigned long long)>(library, "cuMemAddressReserve");
  driver.unreserve = symbol<int(uint64_t, size_t)>(library, "cuMemAddressFree");
  driver.create = symbol<int(uint64_t*, size_t, const SlotMemoryKind*, unsigned long long)>(library, "cuMemCreate");
  driver.release = symbol<int(uint64_t)>(library, "cuMemRelease");
  driver.map = symbol<int(uint64_t, size_t, size_t, uint64_t, unsigned long long)>(library, "cuMemMap");
  driver.unmap = symbol<int(uint64_t, size_t)>(library, "cuMemUnmap");
  driver.allow = symbol<int(uint64_t, size_t, const SlotMemoryAccess*, size_t)>(library, "cuMemSetAccess");
  driver.free_memory = symbol<int(size_t*, size_t*)>(library, "cuMemGetInfo_v2");
  return driver;
}

}  // namespace

const PagerDriver& cuda_driver() {
  static const PagerDriver driver = load();
  return driver;
}

const SlotMemoryDriver& cuda_slot_memory_driver() {
  static const SlotMemoryDriver driver = load_slot_memory();
  return driver;
}

}  // namespace glm53
