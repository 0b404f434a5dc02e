/* The shared-memory ABI between a gpu_worker and its cpu_expert: the only hand-written layout in the project.
 *
 * Plain C: the same text compiles as C11, C++17 and CUDA, and every size and offset below is checked by the compiler. Python never
 * computes an offset: kernels/python/_layout.py is generated from this file (kernels/tests/emit_layout.c), for tests and tools only.
 *
 * Two segments, both plain files in a tmpfs (GLM53_SHM_DIR, /dev/shm by default):
 *
 *   glm53-<instance>-arena   the expert records. Big, slow to fill, immutable in the modes `exact` and `fast`. Outlives a worker crash.
 *   glm53-<instance>-ctl     the control region: words, job ring, job buffers. Small, made anew by every worker start.
 *
 * A segment is filled under a temporary name, its `state` becomes READY last, and then it is renamed into place. So whoever can open the
 * final name sees a whole segment; a half-made one has no final name. `generation` is random per creation: a peer that still maps the
 * previous segment keeps a consistent (dead) world, and notices by generation or inode that there is a new one.
 * Only the creator (or the worker that adopted the arena) unlinks. Attaching is open + mmap and never changes the file system.
 *
 * Arena, byte map
 *
 *   0                    AbiArenaHeader, 256 bytes
 *   shapes_offset        MoeExpertShape[num_layers]        how to read a record of that layer
 *   generations_offset   uint32_t[num_slots]               see "Arena slots"
 *   checksums_offset     uint64_t[num_slots]               abi_checksum of the record bytes of the slot
 *   records_offset       uint8_t[num_slots][record_stride] 4 KiB aligned
 *
 * Control region, byte map
 *
 *   0                    AbiCtlHeader: 256 immutable bytes, then one control word per 64-byte line
 *   jobs_offset          ring_len x job_stride: AbiJob, AbiJobExpert[max_experts], pick_row u32[max_picks], pick_out u32[max_picks]
 *   dones_offset         AbiDone[ring_len]
 *   buffers_offset       num_buffers x buffer_stride: x [max_rows][hidden] of x_dtype, then out float[max_picks][hidden]
 *
 * Every offset comes from one function (abi_ctl_geometry, abi_arena_geometry); its result is stored in the header and both sides read it
 * back from there. Byte order and alignment are those of the machine: the segment never leaves it.
 */
#ifndef GLM53_EXPERT_ABI_H_
#define GLM53_EXPERT_ABI_H_

#include <stddef.h>
#include <stdint.h>

#include "moe_expert.h"

#ifdef __cplusplus
extern "C" {
#define ABI_STATIC_ASSERT static_assert
#else
#define ABI_STATIC_ASSERT _Static_assert
#endif

/* Bumped by hand when the meaning of a field changes; a change of layout alone is caught by layout_hash. */
#define ABI_VERSION 1u
#define ABI_ARENA_MAGIC UINT64_C(0x616e657261333547) /* "G53arena" read as little endian */
#define ABI_CTL_MAGIC UINT64_C(0x6c6f72746e333547)   /* "G53ntrol" */
#define ABI_LINE 64u                                 /* one control word per cache line: no false sharing between two writers */
#define ABI_PAGE 4096u
#define ABI_MAX_LAYERS 128u
#define ABI_HASH_BYTES 32u

/* `state` of both segments. */
enum AbiState { ABI_STATE_NONE = 0, ABI_STATE_FILLING = 1, ABI_STATE_READY = 2 };

/* server_state, written by cpu_expert. DRAINED: it will take no job any more and has finished what it had taken. */
enum AbiServerState { ABI_SERVER_NONE = 0, ABI_SERVER_SERVING = 1, ABI_SERVER_DRAINED = 2 };

/* AbiDone.status. Anything but OK means that no row of the job may be read; the worker then computes the job's picks itself. */
enum AbiStatus {
  ABI_STATUS_NONE = 0,
  ABI_STATUS_OK = 1,
  ABI_STATUS_STALE_RECORD = 2, /* an arena slot's generation was not, or did not stay, the one that the job names */
  ABI_STATUS_BAD_JOB = 3,      /* a count or index of the descriptor is out of range, or the kernel refused the task */
};

/* ---------------------------------------------------------------------------------------------------------------------------------
 * Arena slots
 *
 * A record is one expert's bytes. A slot is a place for a record. In `exact` and `fast` slot == layer * experts_per_layer + expert and a
 * slot is written once, before READY. With an NVMe store behind it the arena has fewer slots than experts and slots are rewritten while
 * jobs run. For that case, and only through this pair, a job names its records: (slot, generation).
 *
 *   generation 0        never filled
 *   generation odd      being rewritten, by the worker
 *   generation even > 0 holds a whole record
 *
 * The worker rewrites a slot only after both kinds of reader have passed: every device pass and every job that named the slot. It makes the
 * generation odd (release) before the first byte and even after the last (release). The server reads the generation (acquire) before it
 * uses a record and again after; a difference is STALE_RECORD. So an abandoned job whose server wakes late can never have its rows taken
 * for the new record's, whoever rewrote the slot meanwhile.
 */

/* Immutable once state is READY, except that the worker rewrites slots as described. */
#define ABI_ARENA_HEADER_FIELDS(FIELD, ARRAY)                                                                    \
  FIELD(uint64_t, magic)                                                                                         \
  FIELD(uint32_t, abi_version)                                                                                   \
  FIELD(uint32_t, arithmetic_version) /* MOE_ARITHMETIC_VERSION: records mean other results under another one */ \
  FIELD(uint64_t, layout_hash)                                                                                   \
  FIELD(uint64_t, total_bytes) /* size of the file: a truncated segment is refused before it is mapped */        \
  FIELD(uint64_t, generation)                                                                                    \
  FIELD(uint32_t, state) /* AbiState; release-stored last by the creator */                                      \
  FIELD(uint32_t, num_layers)                                                                                    \
  FIELD(uint32_t, experts_per_layer)                                                                             \
  FIELD(uint32_t, record_stride) /* bytes between records: the largest record of any layer */                    \
  FIELD(uint64_t, num_slots)                                                                                     \
  FIELD(uint64_t, shapes_offset)                                                                                 \
  FIELD(uint64_t, generations_offset)                                                                            \
  FIELD(uint64_t, checksums_offset)                                                                              \
  FIELD(uint64_t, records_offset)                                                                                \
  ARRAY(uint8_t, checkpoint_hash, 32)                                                                            \
  ARRAY(uint8_t, reserved, 128)

/* ---------------------------------------------------------------------------------------------------------------------------------
 * Control region
 *
 * Who writes what. W = the worker's controller thread (and its housekeeper for the heartbeat), S = the cpu_expert's serving thread (and
 * its heartbeat thread for the heartbeat). Nobody else ever writes; no word has two writers; no read-modify-write is needed anywhere.
 * All stores of control words are release, all loads acquire, unless the text says more.
 *
 *   state          W  READY once, before the rename
 *   worker_beat    W  CLOCK_MONOTONIC ns, about every 50 ms. Pids mean nothing across containers, so life is shown by a clock
 *   epoch          W  starts at 1; +1 for every abort
 *   abort_epoch    W  all jobs of epochs <= this are abandoned. Set before epoch moves, and before anything is recomputed
 *   quit           W  1: the worker closes the region for good
 *   job_head       W  number of jobs published since creation; job s (1, 2, 3, ...) is published when job_head >= s
 *   doorbell       W  futex word: +1 after every change that the server must look at
 *   worker_asleep  W  1 while the worker may sleep on done_bell
 *   server_id      S  random, not 0; written when a server has attached. Another value = another server process
 *   server_state   S  AbiServerState
 *   server_beat    S  CLOCK_MONOTONIC ns; published only while the serving loop makes progress
 *   ack_epoch      S  the server will never again touch a descriptor, a buffer or a done entry of an earlier epoch
 *   job_tail       S  number of jobs that the server is through with (served, or skipped because their epoch had ended)
 *   done_bell      S  futex word: +1 after every done entry, acknowledgement and change of server_state
 *   server_asleep  S  1 while the server may sleep on doorbell
 *
 * Sleeping. The sleeper stores *_asleep = 1, then a full fence, then looks at the bell once more, then calls futex(WAIT) with the value
 * that it saw and a deadline. The waker stores the bell, then a full fence, then looks at *_asleep, and calls futex(WAKE) only if it is
 * set. One of the two must see the other's store, so no wake-up is lost, and a busy peer costs no system call. The futexes are shared (not
 * PRIVATE) ones. Both sides poll for a bounded time first. Every wait has a deadline, so even a lost wake-up would only cost that.
 *
 * The way of job s, epoch e, ring entry r = s % ring_len, buffer b
 *   W1  needs: lane up (ack_epoch == epoch == e, server serving, heartbeat fresh), s - job_tail <= ring_len, a buffer b that no pass reads
 *   W2  writes the descriptor in entry r and the activations into b (a GPU has written them before W1, into the buffer of its step's
 *       number: under an abandoned job activations may change; its rows are read by nobody, kernels/cuda/device_lane.h)
 *   W3  job_head = s (release), doorbell
 *   S1  sees job_head >= s; copies the descriptor to private memory, checks seq, epoch and every index of the copy (CLAIMED)
 *   S2  checks the generations, evaluates the records in place, writes the rows of b, checks the generations again (COMPUTED)
 *   S3  fills done[r], seq last (release); job_tail = s (PUBLISHED); done_bell
 *   W4  sees done[r].seq == s (acquire) and done[r].epoch == e, e still being its own epoch: the rows of b are whole and may be read
 *   W5  the consumer's pass is over: b is free again
 * Before each of S1, S2, S3 the server looks at abort_epoch; if the job's epoch has ended it goes to the acknowledgement instead.
 *
 * Why reuse is safe
 * - Entry r is rewritten (job s + ring_len) only when job_tail >= s: the server has left entry r and its done entry (S3 precedes).
 * - Buffer b is rewritten only after W5, hence after W4, hence after S2.
 * - An abandoned job is one for which W4 never came. W sets abort_epoch = e and epoch = e + 1, and computes the job's picks itself into
 *   memory of its own. From then on no job is published until ack_epoch == e + 1 (W1), so every entry and every buffer of an open job of
 *   epoch e stays as it is: quarantined. The server, whenever it wakes and wherever it stood, may still write rows and a done entry of
 *   epoch e: nobody reads them (W4 compares the epoch). When it next looks at `epoch` it takes job_head as its new position and then
 *   stores ack_epoch (release), which orders all its earlier stores before anything that W writes afterwards.
 * - A server that died takes part in nothing. (W sees that the lock on the file is free, which is quicker than a missed heartbeat.) Its
 *   successor can attach only when it is dead, takes the position job_head, acknowledges the epoch and then shows a new server_id; W
 *   treats a new server_id as an abort.
 */
#define ABI_CTL_HEADER_FIELDS(FIELD, ARRAY)                                                                 \
  FIELD(uint64_t, magic)                                                                                    \
  FIELD(uint32_t, abi_version)                                                                              \
  FIELD(uint32_t, arithmetic_version)                                                                       \
  FIELD(uint64_t, layout_hash)                                                                              \
  FIELD(uint64_t, total_bytes)                                                                              \
  FIELD(uint64_t, generation)                                                                               \
  FIELD(uint64_t, arena_generation) /* the arena that the jobs of this region name */                       \
  FIELD(uint32_t, ring_len)         /* job descriptors */                                                   \
  FIELD(uint32_t, num_buffers)      /* job buffers, >= 4 */                                                 \
  FIELD(uint32_t, max_rows)         /* activation rows of a job */                                          \
  FIELD(uint32_t, max_picks)        /* result rows of a job */                                              \
  FIELD(uint32_t, max_experts)      /* distinct records of a job */                                         \
  FIELD(uint32_t, hidden)                                                                                   \
  FIELD(uint64_t, jobs_offset)                                                                              \
  FIELD(uint64_t, job_stride)                                                                               \
  FIELD(uint64_t, experts_offset)  /* inside a job: AbiJobExpert[max_experts] */                            \
  FIELD(uint64_t, pick_row_offset) /* inside a job: uint32_t[max_picks], row of x */                        \
  FIELD(uint64_t, pick_out_offset) /* inside a job: uint32_t[max_picks], row of out */                      \
  FIELD(uint64_t, dones_offset)                                                                             \
  FIELD(uint64_t, buffers_offset)                                                                           \
  FIELD(uint64_t, buffer_stride)                                                                            \
  FIELD(uint64_t, out_offset) /* inside a buffer: float[max_picks][hidden]; x is at 0 */                    \
  ARRAY(uint8_t, reserved, 112)                                                                             \
  FIELD(AbiWord, state)                                                                                     \
  FIELD(AbiWord, worker_beat)                                                                               \
  FIELD(AbiWord, epoch)                                                                                     \
  FIELD(AbiWord, abort_epoch)                                                                               \
  FIELD(AbiWord, quit)                                                                                      \
  FIELD(AbiWord, job_head)                                                                                  \
  FIELD(AbiBell, doorbell)                                                                                  \
  FIELD(AbiBell, worker_asleep)                                                                             \
  FIELD(AbiWord, server_id)                                                                                 \
  FIELD(AbiWord, server_state)                                                                              \
  FIELD(AbiWord, server_beat)                                                                               \
  FIELD(AbiWord, ack_epoch)                                                                                 \
  FIELD(AbiWord, job_tail)                                                                                  \
  FIELD(AbiBell, done_bell)                                                                                 \
  FIELD(AbiBell, server_asleep)                                                                             \
  FIELD(AbiWord, server_picks)   /* S: rows computed since it attached; for people, not for the protocol */ \
  FIELD(AbiWord, server_variant) /* S: MoeVariant of its kernel */                                          \
  FIELD(AbiWord, server_threads) /* S: threads of its kernel */

/* A 64-bit control word alone on its line. */
#define ABI_WORD_FIELDS(FIELD, ARRAY) \
  FIELD(uint64_t, value)              \
  ARRAY(uint8_t, pad, 56)

/* A 32-bit control word alone on its line: futexes are 32 bits wide. */
#define ABI_BELL_FIELDS(FIELD, ARRAY) \
  FIELD(uint32_t, value)              \
  ARRAY(uint8_t, pad, 60)

/* One job: written by W before job_head, read by S after it. The server trusts no field: it checks its own copy. */
#define ABI_JOB_FIELDS(FIELD, ARRAY)                                                              \
  FIELD(uint64_t, seq)                                                                            \
  FIELD(uint64_t, epoch)                                                                          \
  FIELD(uint32_t, layer) /* which MoeExpertShape of the arena */                                  \
  FIELD(uint32_t, num_rows)                                                                       \
  FIELD(uint32_t, num_experts)                                                                    \
  FIELD(uint32_t, num_picks)                                                                      \
  FIELD(uint32_t, x_dtype) /* MoeDtype */                                                         \
  FIELD(uint32_t, buffer)                                                                         \
  FIELD(uint32_t, flags) /* 0: one unweighted fp32 row per pick. Others are refused as BAD_JOB */ \
  FIELD(uint32_t, reserved)                                                                       \
  ARRAY(uint8_t, pad, 16)

#define ABI_JOB_EXPERT_FIELDS(FIELD, ARRAY)                    \
  FIELD(uint32_t, arena_slot)                                  \
  FIELD(uint32_t, generation)                                  \
  FIELD(uint32_t, first_pick) /* into pick_row and pick_out */ \
  FIELD(uint32_t, num_picks)

/* Written by S only. seq is stored last (release); a reader that sees its own seq sees the rest. */
#define ABI_DONE_FIELDS(FIELD, ARRAY)               \
  FIELD(uint64_t, seq)                              \
  FIELD(uint64_t, epoch)                            \
  FIELD(uint32_t, status) /* AbiStatus */           \
  FIELD(uint32_t, num_picks)                        \
  FIELD(uint64_t, claimed_ns) /* CLOCK_MONOTONIC */ \
  FIELD(uint64_t, done_ns)                          \
  ARRAY(uint8_t, pad, 24)

#define ABI_FIELD(type, name) type name;
#define ABI_ARRAY(type, name, count) type name[count];
typedef struct AbiWord {
  ABI_WORD_FIELDS(ABI_FIELD, ABI_ARRAY)
} AbiWord;
typedef struct AbiBell {
  ABI_BELL_FIELDS(ABI_FIELD, ABI_ARRAY)
} AbiBell;
typedef struct AbiArenaHeader {
  ABI_ARENA_HEADER_FIELDS(ABI_FIELD, ABI_ARRAY)
} AbiArenaHeader;
typedef struct AbiCtlHeader {
  ABI_CTL_HEADER_FIELDS(ABI_FIELD, ABI_ARRAY)
} AbiCtlHeader;
typedef struct AbiJob {
  ABI_JOB_FIELDS(ABI_FIELD, ABI_ARRAY)
} AbiJob;
typedef struct AbiJobExpert {
  ABI_JOB_EXPERT_FIELDS(ABI_FIELD, ABI_ARRAY)
} AbiJobExpert;
typedef struct AbiDone {
  ABI_DONE_FIELDS(ABI_FIELD, ABI_ARRAY)
} AbiDone;
#undef ABI_FIELD
#undef ABI_ARRAY

/* Every structure of the ABI, for the layout hash and the generated Python mirror. */
#define ABI_STRUCTS(X)                       \
  X(AbiWord, ABI_WORD_FIELDS)                \
  X(AbiBell, ABI_BELL_FIELDS)                \
  X(AbiArenaHeader, ABI_ARENA_HEADER_FIELDS) \
  X(AbiCtlHeader, ABI_CTL_HEADER_FIELDS)     \
  X(AbiJob, ABI_JOB_FIELDS)                  \
  X(AbiJobExpert, ABI_JOB_EXPERT_FIELDS)     \
  X(AbiDone, ABI_DONE_FIELDS)

/* Sizes and offsets that peers rely on. A field added, removed, widened or moved stops the build here: bump ABI_VERSION with it. */
ABI_STATIC_ASSERT(sizeof(MoeExpertShape) == 72, "MoeExpertShape is stored in the arena");
ABI_STATIC_ASSERT(sizeof(AbiWord) == ABI_LINE && sizeof(AbiBell) == ABI_LINE, "a control word owns its line");
ABI_STATIC_ASSERT(sizeof(AbiArenaHeader) == 256, "arena header");
ABI_STATIC_ASSERT(offsetof(AbiArenaHeader, state) == 40, "arena header: state");
ABI_STATIC_ASSERT(offsetof(AbiArenaHeader, num_slots) == 56, "arena header: num_slots");
ABI_STATIC_ASSERT(offsetof(AbiArenaHeader, records_offset) == 88, "arena header: records_offset");
ABI_STATIC_ASSERT(offsetof(AbiArenaHeader, checkpoint_hash) == 96, "arena header: checkpoint_hash");
ABI_STATIC_ASSERT(offsetof(AbiCtlHeader, arena_generation) == 40, "control header: arena_generation");
ABI_STATIC_ASSERT(offsetof(AbiCtlHeader, jobs_offset) == 72, "control header: jobs_offset");
ABI_STATIC_ASSERT(offsetof(AbiCtlHeader, state) == 256, "control words begin after the immutable part");
ABI_STATIC_ASSERT(offsetof(AbiCtlHeader, job_head) == 256 + 5 * 64, "control header: job_head");
ABI_STATIC_ASSERT(offsetof(AbiCtlHeader, server_id) == 256 + 8 * 64, "the server's words begin on their own line");
ABI_STATIC_ASSERT(offsetof(AbiCtlHeader, server_threads) == 256 + 17 * 64, "control header: server_threads");
ABI_STATIC_ASSERT(sizeof(AbiCtlHeader) == 256 + 18 * 64, "control header");
ABI_STATIC_ASSERT(sizeof(AbiJob) == 64, "job");
ABI_STATIC_ASSERT(sizeof(AbiJobExpert) == 16, "job expert");
ABI_STATIC_ASSERT(sizeof(AbiDone) == 64, "done entry");

/* ---------------------------------------------------------------------------------------------------------------------------------
 * Functions of the layout (expert_abi.c)
 */
#define ABI_API __attribute__((visibility("default")))

/* FNV-1a over the name, field names, offsets and sizes of every structure above and of MoeExpertShape. */
ABI_API uint64_t abi_layout_hash(void);
/* Fills every offset, stride and total_bytes from ring_len, num_buffers, max_rows, max_picks, max_experts, hidden. -1: one is out of range.
 */
ABI_API int abi_ctl_geometry(AbiCtlHeader* header);
/* Fills every offset and total_bytes from num_layers, experts_per_layer, num_slots, record_stride. -1: one is out of range. */
ABI_API int abi_arena_geometry(AbiArenaHeader* header);
/* Checksum of a record, 64 bit. bytes: a multiple of 32. */
ABI_API uint64_t abi_checksum(const void* data, uint64_t bytes);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_EXPERT_ABI_H_ */
