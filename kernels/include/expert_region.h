/* Access to the two segments: ordered loads and stores, sleeping, creating, attaching.
 *
 * The inline functions are the only way to a control word, so the ordering of every access is stated here and not inherited from x86.
 * The rest is the C interface that Python loads with ctypes. A function that can fail returns NULL or -1 and leaves code and text in
 * glm53_error_code() and glm53_error_text() of the calling thread.
 */
#ifndef GLM53_EXPERT_REGION_H_
#define GLM53_EXPERT_REGION_H_

#include "expert_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline uint64_t abi_load(const AbiWord* word) { return __atomic_load_n(&word->value, __ATOMIC_ACQUIRE); }
static inline void abi_store(AbiWord* word, uint64_t value) { __atomic_store_n(&word->value, value, __ATOMIC_RELEASE); }
static inline uint32_t abi_load_bell(const AbiBell* bell) { return __atomic_load_n(&bell->value, __ATOMIC_ACQUIRE); }
static inline void abi_store_bell(AbiBell* bell, uint32_t value) { __atomic_store_n(&bell->value, value, __ATOMIC_RELEASE); }
/* Between one's own store and the look at the peer's word: see "Sleeping" in expert_abi.h. */
static inline void abi_full_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline uint64_t abi_load_seq(const uint64_t* seq) { return __atomic_load_n(seq, __ATOMIC_ACQUIRE); }
static inline void abi_store_seq(uint64_t* seq, uint64_t value) { __atomic_store_n(seq, value, __ATOMIC_RELEASE); }
static inline uint32_t abi_load_generation(const uint32_t* generation) { return __atomic_load_n(generation, __ATOMIC_ACQUIRE); }
static inline void abi_store_generation(uint32_t* generation, uint32_t value) { __atomic_store_n(generation, value, __ATOMIC_RELEASE); }

enum Glm53Error {
  GLM53_OK = 0,
  GLM53_INVALID = 1,  /* an argument is wrong */
  GLM53_MISMATCH = 2, /* the segment is of another version, layout, size, generation or checkpoint: both values are in the text */
  GLM53_NO_SPACE = 3, /* the tmpfs is too small: the needed size is in the text */
  GLM53_ABSENT = 4,   /* no such segment (yet) */
  GLM53_IN_USE = 5,   /* another live process holds the segment's lock */
  GLM53_SYSTEM = 6,   /* a system call failed: errno's text is in the text */
  GLM53_TIMEOUT = 7,  /* a deadline passed */
  GLM53_INTERNAL = 8, /* a kernel or protocol invariant broke */
};
ABI_API int glm53_error_code(void);
ABI_API const char* glm53_error_text(void);

/* Sleeps until *word differs from `seen`, somebody wakes it, or timeout_ns passed. Shared between processes. Spurious returns happen. */
ABI_API void abi_futex_wait(const uint32_t* word, uint32_t seen, int64_t timeout_ns);
ABI_API void abi_futex_wake(uint32_t* word);
/* CLOCK_MONOTONIC, the clock of every time in the segments. */
ABI_API uint64_t abi_now_ns(void);

typedef struct Glm53Arena Glm53Arena;
typedef struct Glm53Region Glm53Region;

/* Makes an arena of num_slots = num_layers * experts_per_layer records under a temporary name, all memory reserved before it returns, and
 * takes its lock. shapes: [num_layers]; all layers have the same `hidden`. checkpoint_hash: 32 bytes. */
ABI_API Glm53Arena* glm53_arena_create(const char* path, const MoeExpertShape* shapes, uint32_t num_layers, uint32_t experts_per_layer,
                                       const uint8_t* checkpoint_hash);
/* Maps a READY arena to read it: no lock, never unlinks. generation: the one that it must have, 0 = any. */
ABI_API Glm53Arena* glm53_arena_attach(const char* path, uint64_t generation);
/* Takes over a READY arena that a dead worker left, if it is exactly the one that create would make. GLM53_ABSENT: there is none;
 * GLM53_MISMATCH: it is another one; GLM53_IN_USE: its worker lives. */
ABI_API Glm53Arena* glm53_arena_adopt(const char* path, const MoeExpertShape* shapes, uint32_t num_layers, uint32_t experts_per_layer,
                                      const uint8_t* checkpoint_hash);
ABI_API void* glm53_arena_record(Glm53Arena* arena, uint64_t slot);
/* Checksums of the slots [first, first + count) and generation 2 for them. Threads may call it for different ranges. */
ABI_API int glm53_arena_finish(Glm53Arena* arena, uint64_t first, uint64_t count);
/* Finishes what is not finished yet, sets READY, renames into place. */
ABI_API int glm53_arena_seal(Glm53Arena* arena);
/* 1: the record equals its checksum, 0: it does not. */
ABI_API int glm53_arena_check(Glm53Arena* arena, uint64_t slot);
/* Rewrites a slot of a sealed arena: begin makes its generation odd, end writes the checksum and makes it even. Only the owner. */
ABI_API int glm53_arena_rewrite_begin(Glm53Arena* arena, uint64_t slot);
ABI_API int glm53_arena_rewrite_end(Glm53Arena* arena, uint64_t slot);
ABI_API uint32_t glm53_arena_generation_of(const Glm53Arena* arena, uint64_t slot);
/* A number of the header by its field name; UINT64_MAX for an unknown name. */
ABI_API uint64_t glm53_arena_field(const Glm53Arena* arena, const char* name);
ABI_API const AbiArenaHeader* glm53_arena_header(const Glm53Arena* arena);
ABI_API const MoeExpertShape* glm53_arena_shape(const Glm53Arena* arena, uint32_t layer);
/* Removes the name if it still names this segment. Only the owner; -1 for an attacher. */
ABI_API int glm53_arena_unlink(Glm53Arena* arena);
ABI_API void glm53_arena_close(Glm53Arena* arena);

/* Makes a control region for the arena and renames it over an old one. max_picks = max_rows * top_k of the model. */
ABI_API Glm53Region* glm53_region_create(const char* path, const Glm53Arena* arena, uint32_t ring_len, uint32_t num_buffers,
                                         uint32_t max_rows, uint32_t max_picks);
/* generation: the one that it must have, 0 = any. */
ABI_API Glm53Region* glm53_region_attach(const char* path, uint64_t generation);
/* A number of the header or the value of a control word by its field name; UINT64_MAX for an unknown name. */
ABI_API uint64_t glm53_region_field(const Glm53Region* region, const char* name);
ABI_API AbiCtlHeader* glm53_region_header(const Glm53Region* region);
/* 1: the path still names this very segment. 0: it is gone, or another one took its place. */
ABI_API int glm53_region_current(const Glm53Region* region);
/* Sets quit, rings, removes the name if it still names this segment. Only the creator; -1 for an attacher. */
ABI_API int glm53_region_unlink(Glm53Region* region);
ABI_API void glm53_region_close(Glm53Region* region);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_EXPERT_REGION_H_ */
