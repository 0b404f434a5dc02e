// kernels/include/expert_pager.h.
#include "bindings/guard.h"
#include "cuda/device_pager.h"

struct Glm53Pager {
  glm53::DevicePager impl;
};

using glm53::guarded;

Glm53Pager* glm53_pager_create(const PagerSpec* spec) {
  return guarded<Glm53Pager*>(nullptr, [&] { return new Glm53Pager{glm53::DevicePager(*spec)}; });
}

int glm53_pager_step(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t selected, void* stream) {
  return guarded(-1, [&] {
    pager->impl.step(layer, rows, selected, stream);
    return 0;
  });
}

int glm53_pager_put(Glm53Pager* pager, uint32_t record, uint32_t slot) {
  return guarded(-1, [&] {
    pager->impl.put(record, slot);
    return 0;
  });
}

int glm53_pager_vacate(Glm53Pager* pager, uint32_t first_slot, uint32_t count) {
  return guarded(-1, [&] {
    pager->impl.vacate(first_slot, count);
    return 0;
  });
}

int glm53_pager_flush(Glm53Pager* pager, void* stream) {
  return guarded(-1, [&] {
    pager->impl.flush(stream);
    return 0;
  });
}

int glm53_pager_where(Glm53Pager* pager, int32_t* slot_of) {
  return guarded(-1, [&] {
    pager->impl.where(slot_of);
    return 0;
  });
}

int glm53_pager_heat_read(Glm53Pager* pager, float* slow, float* fast) {
  return guarded(-1, [&] {
    pager->impl.read_heat(slow, fast);
    return 0;
  });
}

int glm53_pager_heat_write(Glm53Pager* pager, const float* slow, const float* fast) {
  return guarded(-1, [&] {
    pager->impl.write_heat(slow, fast);
    return 0;
  });
}

int glm53_pager_stats(Glm53Pager* pager, uint64_t counters[8]) {
  return guarded(-1, [&] {
    pager->impl.stats(counters);
    return 0;
  });
}

void glm53_pager_close(Glm53Pager* pager) { delete pager; }
