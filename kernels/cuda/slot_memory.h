// Device memory for expert slots that can be lent and taken back without any address changing.
//
// A range of addresses is reserved once. Physical memory is mapped into it in chunks; the mapped ones are always the first ones. Lending
// unmaps chunks from the end, which gives their memory back to the device, where torch's allocator finds it; taking back maps new memory
// under the same addresses. Contents of what was lent are gone.
//
// A chunk's handle is released as soon as it is mapped: the mapping alone keeps the memory, so unmapping is all that giving back takes.
#pragma once

#include <cstdint>

#include "expert_slots.h"

namespace glm53 {

class SlotMemory {
 public:
  // Throws kSystem with what was asked for and what is free when the device has too little; nothing is left mapped then.
  SlotMemory(uint64_t bytes, uint64_t chunk_bytes, int device, const SlotMemoryDriver& driver);
  ~SlotMemory();
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  uint64_t address() const { return address_; }
  uint64_t mapped() const { return usable(chunks_); }
  uint64_t left(uint64_t bytes) const { return usable(chunks_after(bytes)); }
  void lend(uint64_t bytes);
  // False when the device has no more to give now.
  bool take_back(uint64_t leave_free);

 private:
  uint64_t offset(uint64_t chunk) const { return chunk * chunk_bytes_; }
  uint64_t size(uint64_t chunk) const;  // the last chunk is as small as the device allows
  uint64_t usable(uint64_t chunks) const;
  uint64_t chunks_after(uint64_t bytes) const;
  // The driver's code; nothing is left of a chunk that failed.
  int map_next();
  bool room_for_next(uint64_t leave_free) const;
  void unmap_last();
  void give_up();

  const SlotMemoryDriver driver_;
  const SlotMemoryKind kind_;
  uint64_t bytes_, chunk_bytes_, total_bytes_, num_chunks_;  // total: reserved
  uint64_t address_ = 0;
  uint64_t chunks_ = 0;  // mapped, from the front
};

// The CUDA driver's, found at run time. Throws kSystem with the name of what is missing.
const SlotMemoryDriver& cuda_slot_memory_driver();

}  // namespace glm53
