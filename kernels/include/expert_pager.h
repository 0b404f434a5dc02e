/* C interface of the device pager: brings the expert records that a decode step picked into slots of device memory, while the device waits
 * for its word and nobody else does. kernels/cuda/device_pager.h says how.
 *
 * Errors as in expert_region.h: NULL or -1, then glm53_error_code() and glm53_error_text() of the calling thread.
 */
#ifndef GLM53_EXPERT_PAGER_H_
#define GLM53_EXPERT_PAGER_H_

#include "expert_region.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Glm53Pager Glm53Pager;

/* The driver calls that the pager makes, with the CUDA driver's own meaning; 0 is success. Tests hand in their own. */
typedef struct PagerDriver {
  int (*context_get)(void** context);
  int (*context_set)(void* context);
  int (*copy_to_host)(void* to, uint64_t from, size_t bytes, void* stream);
  int (*copy_to_device)(uint64_t to, const void* from, size_t bytes, void* stream);
  int (*write_word)(void* stream, uint64_t address, uint32_t value, uint32_t flags);
  int (*wait_word)(void* stream, uint64_t address, uint32_t value, uint32_t flags);
} PagerDriver;

typedef struct PagerSpec {
  uint32_t num_layers;
  uint32_t experts_per_layer;
  uint32_t num_slots;
  uint32_t num_transit; /* of these, the first ones hold records for one step at a time */
  uint32_t max_rows;    /* rows of a step */
  uint32_t top_k;       /* picks of a row */
  uint32_t num_parts;   /* tables of a layer */
  uint32_t max_copies;  /* records of one layer step; the rest are read in place */
  uint64_t record_stride;
  const uint8_t* host;     /* records, pinned: [num_layers * experts_per_layer][record_stride] */
  uint64_t host_on_device; /* the same as the device addresses them */
  uint64_t slots;          /* device: [num_slots][record_stride] */
  uint64_t table;          /* device: int64 [num_layers][num_parts][experts_per_layer], the addresses that kernels read */
  const int64_t* offsets;  /* [num_layers][num_parts]: where a record's parts begin; copied */
  int64_t* mirror;         /* pinned: as table */
  int64_t* picks;          /* pinned: [num_layers][max_rows * top_k] */
  uint32_t* words;         /* pinned, mapped, 256 bytes, zeroed: [0] raised by the device, [32] waited for by it */
  uint64_t words_on_device;
  void* copy_stream;
  const PagerDriver* driver; /* NULL: the CUDA driver's */
  float slow_half_life, fast_half_life, fast_weight, admit_margin;
  uint32_t admit_after;
} PagerSpec;

/* Starts the pager's thread. The calling thread's CUDA context is the one that is used. Everything that the spec names must outlive it. */
ABI_API Glm53Pager* glm53_pager_create(const PagerSpec* spec);
/* Enqueues on `stream`: the copy of `selected` (device, int64 [rows][top_k]), the request, the wait. Never waits itself. */
ABI_API int glm53_pager_step(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t selected, void* stream);
/* The device must be idle for the following, as far as decode steps go. */
ABI_API int glm53_pager_put(Glm53Pager* pager, uint32_t record, uint32_t slot); /* the record's bytes are in the slot */
ABI_API int glm53_pager_vacate(Glm53Pager* pager, uint32_t first_slot, uint32_t count);
ABI_API int glm53_pager_flush(Glm53Pager* pager, void* stream); /* enqueues every table that changed */
/* slot_of int32 [num_layers * experts_per_layer], -1: on the host only. */
ABI_API int glm53_pager_where(Glm53Pager* pager, int32_t* slot_of);
/* How hot each record is, as of now: float [num_layers * experts_per_layer] each. write: what an earlier run read. */
ABI_API int glm53_pager_heat_read(Glm53Pager* pager, float* slow, float* fast);
ABI_API int glm53_pager_heat_write(Glm53Pager* pager, const float* slow, const float* fast);
/* counters u64[8]: layer steps, picks, hits, distinct records missed, of these admitted, in transit, read in place, bytes copied. -1 when a
 * driver call failed: what is running may be wrong. */
ABI_API int glm53_pager_stats(Glm53Pager* pager, uint64_t counters[8]);
/* Answers what is outstanding, then ends the thread. */
ABI_API void glm53_pager_close(Glm53Pager* pager);

#ifdef __cplusplus
}
#endif
#endif
