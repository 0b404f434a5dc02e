// kernels/include/expert_slots.h.
#include "bindings/guard.h"
#include "cuda/slot_memory.h"

struct Glm53SlotMemory {
  glm53::SlotMemory impl;
};

using glm53::guarded;

Glm53SlotMemory* glm53_slots_create(uint64_t bytes, uint64_t chunk_bytes, int device, const SlotMemoryDriver* driver) {
  return guarded<Glm53SlotMemory*>(nullptr, [&] {
    const SlotMemoryDriver& calls = driver != nullptr ? *driver : glm53::cuda_slot_memory_driver();
    return new Glm53SlotMemory{glm53::SlotMemory(bytes, chunk_bytes, device, calls)};
  });
}

uint64_t glm53_slots_address(const Glm53SlotMemory* memory) { return memory->impl.address(); }

uint64_t glm53_slots_mapped(const Glm53SlotMemory* memory) { return memory->impl.mapped(); }

uint64_t glm53_slots_left(const Glm53SlotMemory* memory, uint64_t bytes) { return memory->impl.left(bytes); }

int glm53_slots_lend(Glm53SlotMemory* memory, uint64_t bytes) {
  return guarded(-1, [&] {
    memory->impl.lend(bytes);
    return 0;
  });
}

int glm53_slots_take_back(Glm53SlotMemory* memory, uint64_t leave_free) {
  return guarded(-1, [&] { return memory->impl.take_back(leave_free) ? 1 : 0; });
}

void glm53_slots_close(Glm53SlotMemory* memory) { delete memory; }
