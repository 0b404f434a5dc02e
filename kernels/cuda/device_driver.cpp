#include "cuda/device_driver.h"

#include <dlfcn.h>

#include "tier/error.h"

namespace glm53 {
namespace {

template <typename Function>
Function* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) throw Error(GLM53_SYSTEM, format("libcuda.so.1 has no %s: the GPU driver is too old", name));
  return reinterpret_cast<Function*>(found);
}

PagerDriver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw Error(GLM53_SYSTEM, format("libcuda.so.1 cannot be loaded: %s", dlerror()));
  PagerDriver driver{};
  driver.context_get = symbol<int(void**)>(library, "cuCtxGetCurrent");
  driver.context_set = symbol<int(void*)>(library, "cuCtxSetCurrent");
  driver.copy_to_host = symbol<int(void*, uint64_t, size_t, void*)>(library, "cuMemcpyDtoHAsync_v2");
  driver.copy_to_device = symbol<int(uint64_t, const void*, size_t, void*)>(library, "cuMemcpyHtoDAsync_v2");
  driver.write_word = symbol<int(void*, uint64_t, uint32_t, uint32_t)>(library, "cuStreamWriteValue32_v2");
  driver.wait_word = symbol<int(void*, uint64_t, uint32_t, uint32_t)>(library, "cuStreamWaitValue32_v2");
  return driver;
}

}  // namespace

const PagerDriver& cuda_driver() {
  static const PagerDriver driver = load();
  return driver;
}

}  // namespace glm53
