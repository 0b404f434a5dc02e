/* C interface of the memory that expert slots lie in: one range of the device's addresses for good, backed chunk by chunk, so that the end
 * of it can be lent to whoever needs device memory for a while. kernels/cuda/slot_memory.h says how.
 *
 * Errors as in expert_region.h: NULL or -1, then glm53_error_code() and glm53_error_text() of the calling thread.
 */
#ifndef GLM53_EXPERT_SLOTS_H_
#define GLM53_EXPERT_SLOTS_H_

#include "expert_region.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Glm53SlotMemory Glm53SlotMemory;

/* CUmemAllocationProp and CUmemAccessDesc of the CUDA driver: the library is built where its headers are not. */
typedef struct SlotMemoryPlace {
  int32_t type; /* 1: device memory */
  int32_t device;
} SlotMemoryPlace;
typedef struct SlotMemoryKind {
  int32_t type; /* 1: does not move */
  int32_t handles;
  SlotMemoryPlace place;
  void* security;
  uint8_t flags[8];
} SlotMemoryKind;
typedef struct SlotMemoryAccess {
  SlotMemoryPlace place;
  int32_t allowed; /* 3: reads and writes */
} SlotMemoryAccess;

/* The driver calls that are made, with the CUDA driver's own meaning; 0 is success, 2 out of memory. Tests hand in their own. */
typedef struct SlotMemoryDriver {
  int (*granularity)(size_t* bytes, const SlotMemoryKind* kind, int recommended);
  int (*reserve)(uint64_t* address, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags);
  int (*unreserve)(uint64_t address, size_t bytes);
  int (*create)(uint64_t* handle, size_t bytes, const SlotMemoryKind* kind, unsigned long long flags);
  int (*release)(uint64_t handle);
  int (*map)(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
  int (*unmap)(uint64_t address, size_t bytes);
  int (*allow)(uint64_t address, size_t bytes, const SlotMemoryAccess* access, size_t count);
  int (*free_memory)(size_t* free_bytes, size_t* total_bytes);
} SlotMemoryDriver;

/* Reserves and maps at least `bytes`. The thread's CUDA context must be of `device`, an ordinal. chunk_bytes is rounded up to what the
 * device maps at a time. driver NULL: the CUDA driver's; else copied. */
ABI_API Glm53SlotMemory* glm53_slots_create(uint64_t bytes, uint64_t chunk_bytes, int device, const SlotMemoryDriver* driver);
ABI_API uint64_t glm53_slots_address(const Glm53SlotMemory* memory); /* the range's, the same for its whole life */
ABI_API uint64_t glm53_slots_mapped(const Glm53SlotMemory* memory);  /* bytes from the address on that may be used, at most `bytes` */
/* How many bytes would stay usable if at least `bytes` in all were lent. */
ABI_API uint64_t glm53_slots_left(const Glm53SlotMemory* memory, uint64_t bytes);
/* Gives whole chunks from the end back to the device until at least `bytes` in all are lent. No work of the device may use them. */
ABI_API int glm53_slots_lend(Glm53SlotMemory* memory, uint64_t bytes);
/* Maps what is lent again, front to back, as long as the device has more than leave_free bytes besides. 1: all of it; 0: the device has no
 * more now; -1: a call failed. What was mapped before that stays usable in each case. */
ABI_API int glm53_slots_take_back(Glm53SlotMemory* memory, uint64_t leave_free);
/* The device must be idle. */
ABI_API void glm53_slots_close(Glm53SlotMemory* memory);

#ifdef __cplusplus
}
#endif
#endif
