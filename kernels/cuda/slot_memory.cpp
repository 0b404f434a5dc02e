#include "cuda/slot_memory.h"

#include <algorithm>
#include <cstddef>

#include "tier/error.h"

namespace glm53 {
namespace {

constexpr int kOutOfMemory = 2;
constexpr int kOnDevice = 1, kPinned = 1, kReadWrite = 3;  // CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ALLOCATION_TYPE_PINNED, ...PROT_READWRITE
constexpr int kMinimum = 0;                                // CU_MEM_ALLOC_GRANULARITY_MINIMUM
constexpr double kMib = 1024.0 * 1024.0;

static_assert(sizeof(SlotMemoryKind) == 32 && offsetof(SlotMemoryKind, place) == 8 && offsetof(SlotMemoryKind, flags) == 24,
              "CUDA's layout");
static_assert(sizeof(SlotMemoryAccess) == 12 && offsetof(SlotMemoryAccess, allowed) == 8, "CUDA's layout");

SlotMemoryKind device_memory(int device) {
  SlotMemoryKind kind{};
  kind.type = kPinned;
  kind.place = {kOnDevice, device};
  return kind;
}

uint64_t round_up(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

[[noreturn]] void refused(const char* what, int code) {
  throw Error(GLM53_SYSTEM, format("the GPU driver refuses to %s memory for expert slots (CUDA error %d)", what, code));
}

}  // namespace

SlotMemory::SlotMemory(uint64_t bytes, uint64_t chunk_bytes, int device, const SlotMemoryDriver& driver)
    : driver_(driver), kind_(device_memory(device)), bytes_(bytes) {
  if (bytes == 0 || chunk_bytes == 0) throw Error(GLM53_INVALID, "slot memory: bytes and chunk_bytes must not be 0");
  size_t step = 0;
  if (const int code = driver_.granularity(&step, &kind_, kMinimum); code != 0 || step == 0) refused("describe", code);
  chunk_bytes_ = round_up(chunk_bytes, step);
  total_bytes_ = round_up(bytes, step);
  num_chunks_ = (total_bytes_ + chunk_bytes_ - 1) / chunk_bytes_;
  if (const int code = driver_.reserve(&address_, total_bytes_, 0, 0, 0); code != 0) refused("reserve addresses of", code);
  while (chunks_ < num_chunks_) {
    const int code = map_next();
    if (code == 0) continue;
    give_up();
    if (code != kOutOfMemory) refused("map", code);
    size_t free = 0, total = 0;
    driver_.free_memory(&free, &total);
    throw Error(GLM53_SYSTEM,
                format("%.0f MiB of device memory were asked for for expert slots, %.0f of %.0f MiB are free",
                       static_cast<double>(bytes) / kMib, static_cast<double>(free) / kMib, static_cast<double>(total) / kMib));
  }
}

SlotMemory::~SlotMemory() { give_up(); }

// Codes are of no use any more: this is how things end, also when the device is lost.
void SlotMemory::give_up() {
  for (; chunks_ > 0; --chunks_) driver_.unmap(address_ + offset(chunks_ - 1), size(chunks_ - 1));
  if (address_ != 0) driver_.unreserve(address_, total_bytes_);
  address_ = 0;
}

uint64_t SlotMemory::size(uint64_t chunk) const { return std::min(chunk_bytes_, total_bytes_ - offset(chunk)); }

uint64_t SlotMemory::usable(uint64_t chunks) const { return std::min(bytes_, offset(chunks)); }

uint64_t SlotMemory::chunks_after(uint64_t bytes) const {
  const uint64_t kept = total_bytes_ - std::min(bytes, total_bytes_);
  return std::min(chunks_, kept == total_bytes_ ? num_chunks_ : kept / chunk_bytes_);
}

int SlotMemory::map_next() {
  const uint64_t at = address_ + offset(chunks_), bytes = size(chunks_);
  const SlotMemoryAccess access{kind_.place, kReadWrite};
  uint64_t handle = 0;
  if (const int code = driver_.create(&handle, bytes, &kind_, 0); code != 0) return code;
  int code = driver_.map(at, bytes, 0, handle, 0);
  driver_.release(handle);
  if (code != 0) return code;
  code = driver_.allow(at, bytes, &access, 1);
  if (code != 0) {
    driver_.unmap(at, bytes);
    return code;
  }
  ++chunks_;
  return 0;
}

void SlotMemory::unmap_last() {
  if (const int code = driver_.unmap(address_ + offset(chunks_ - 1), size(chunks_ - 1)); code != 0) refused("unmap", code);
  --chunks_;
}

void SlotMemory::lend(uint64_t bytes) {
  for (const uint64_t kept = chunks_after(bytes); chunks_ > kept;) unmap_last();
}

bool SlotMemory::room_for_next(uint64_t leave_free) const {
  size_t free = 0, total = 0;
  if (const int code = driver_.free_memory(&free, &total); code != 0) refused("count", code);
  return free >= leave_free + size(chunks_);
}

bool SlotMemory::take_back(uint64_t leave_free) {
  while (chunks_ < num_chunks_) {
    if (!room_for_next(leave_free)) return false;
    const int code = map_next();
    if (code == kOutOfMemory) return false;
    if (code != 0) refused("map", code);
  }
  return true;
}

}  // namespace glm53
