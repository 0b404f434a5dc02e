/* C interface of the device pager: brings the expert records that a decode step picked into slots of device memory, while the device waits
 * for its word and nobody else does. kernels/cuda/device_pager.h says how.
 *
 * Errors as in expert_region.h: NULL or -1, then glm53_error_code() and glm53_error_text() of the calling thread.
 */
#ifndef GLM53_EXPERT_PAGER_H_
#define GLM53_EXPERT_PAGER_H_

#include "expert_region.h"
#include "moe_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Glm53Pager Glm53Pager;

/* The driver calls that the pager makes, with the CUDA driver's own meaning; 0 is success. Tests hand in their own.
 *
 * gather is no call of the driver's but moe_cuda_gather of libglm53_cuda, or NULL. Where it is given, the records that a step misses are
 * copied by one gather instead of by one copy_to_device each; tables, and what hints bring, are copied by copy_to_device all the same. */
typedef struct PagerDriver {
  int (*context_get)(void** context);
  int (*context_set)(void* context);
  int (*copy_to_host)(void* to, uint64_t from, size_t bytes, void* stream);
  int (*copy_to_device)(uint64_t to, const void* from, size_t bytes, void* stream);
  int (*write_word)(void* stream, uint64_t address, uint32_t value, uint32_t flags);
  int (*wait_word)(void* stream, uint64_t address, uint32_t value, uint32_t flags);
  int (*gather)(const MoeCudaCopy* copies, uint32_t count, uint64_t bytes, void* stream);
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
  uint32_t* words; /* pinned, mapped, 256 bytes, zeroed: [0] and [56] raised by the device, [32] and [48] waited for by it, [60] raised
                      on the copy stream, [16], [24] and [28] scratch */
  uint64_t words_on_device;
  void* copy_stream;
  const PagerDriver* driver; /* NULL: the CUDA driver's */
  float slow_half_life, fast_half_life, fast_weight, admit_margin;
  uint32_t admit_after;
  uint32_t link_derate;  /* measurements: every record is copied so many times, as over a link of that fraction of the rate; 1 otherwise */
  int64_t* hints;        /* pinned: [num_layers][max_rows * PAGER_HINT_WIDTH]; NULL when hint_records is 0 */
  uint32_t hint_records; /* most records that one hint brings ahead; twice as many slots, a quarter at most, are set aside for them;
                            0: there are no hints */
  uint32_t hint_chunk;   /* bytes of one copy of a hint; a step's own copies wait for two of them at most */
  float forget_below;    /* picks that have less than this share of their usual chance may be of another subject (heat.h); 0: never */
  uint32_t num_passing;  /* most records of a step that take the coldest records' slots although they are colder, beside num_transit */
} PagerSpec;

enum { PAGER_HINT_WIDTH = 16 }; /* most ids of a row of a hint */

/* `fast`: decode steps run on the integer expert kernels (moe_cuda.h), and cpu_expert may take picks of theirs. The answer has the same
 * bits wherever a pick is computed. One layer step on the compute stream: publish  picks, and activations when the CPU lane may want them,
 * go to the host; the request word is raised wait     for the reply: records are where `records` says, 0 for a pick of the CPU lane run
 * every other pick, one row each wait     for the CPU lane's rows, wherever they were computed combine  fma over ascending slots, then the
 * shared expert Without a CPU lane (none attached, or it does not pay) the last two are left out and `run` sums itself. */
typedef struct PagerFast {
  const Glm53Arena* arena; /* the arena whose records `host` of the spec points at */
  Glm53Region* region;     /* the control region, mapped for the device, or NULL: there is never a CPU lane */
  uint64_t region_on_device;
  uint64_t records;         /* device: u64 [num_layers][experts_per_layer] */
  uint64_t* records_mirror; /* pinned: as records */
  uint64_t picks_on_device; /* of the spec's picks */
  uint64_t y;               /* device: float [max_rows * top_k][hidden] */
  uint64_t arrivals;        /* device: u32, zeroed */
  float* own_rows;          /* pinned, mapped: float [max_rows * top_k][hidden], picks that the worker computes for a broken lane */
  uint64_t own_rows_on_device;
  uint64_t* rows_at; /* pinned, mapped: the device address of the CPU lane's rows of the current step */
  uint64_t rows_at_on_device;
  void* const* experts; /* [num_layers]: what `run` gets for a layer (MoeCudaExperts); copied */
  int (*publish)(const MoeCudaPublish* publish, void* stream);
  int (*run)(void* experts, const MoeCudaStep* step, void* stream);
  int (*combine)(const MoeCudaCombine* combine, void* stream);
  uint64_t heartbeat_timeout_ns, job_timeout_ns;
  /* Microseconds: a step's kernels with n experts in slots take a + b * n; one record over the link. Negative ct_*: measured. */
  double kernel_a_us, kernel_b_us, link_us, ct_a_us, ct_b_us, ct_tzc_us;
  uint32_t variant; /* MoeVariant of the kernel that computes for a broken lane */
} PagerFast;

/* Where picks are computed: as the costs say, or forced, for tests and measurements. */
enum PagerPlacement {
  PAGER_BY_COST = 0,
  PAGER_NEVER_LANE = 1,   /* by cost, without the CPU lane */
  PAGER_ALL_LANE = 2,     /* every pick in the CPU lane while it is up */
  PAGER_ALL_IN_PLACE = 3, /* nothing is admitted: what is in no slot is read in host memory */
  PAGER_RANDOM = 4,       /* any lane for any pick, slots emptied at random */
};

/* The CUDA driver's calls, without a gather. -1 where there is no driver. */
ABI_API int glm53_pager_cuda_driver(PagerDriver* driver);
/* How fast records come into slots by copy_to_device and by the gather of the spec's driver, before a pager is made from the spec: the
 * device must be idle, the slots' bytes are overwritten, and the words must be nobody else's.
 * Groups of `group` records (at most num_slots) go into the first slots, by both ways in turn, until budget_ns is over; the best time of
 * each counts, from the first call to the word behind the group. rates: [2], bytes per second, copy_to_device and gather. The first gather
 * loads its code; the second one runs while compute_stream waits for a word, as it does in a step. -1 when a call fails, or a gather does
 * not come to its end beside a stream that waits; nothing waits any more then. */
ABI_API int glm53_pager_copy_rates(const PagerSpec* spec, void* compute_stream, uint32_t group, uint64_t budget_ns, double* rates);
/* Starts the pager's thread. The calling thread's CUDA context is the one that is used. Everything that the spec names must outlive it. */
ABI_API Glm53Pager* glm53_pager_create(const PagerSpec* spec);
/* The same for `fast`; glm53_pager_step is then not to be called. */
ABI_API Glm53Pager* glm53_pager_create_fast(const PagerSpec* spec, const PagerFast* fast);
/* The two halves of a `fast` step, so that the caller can enqueue work in between that needs no expert. publish waits only
 * while many steps are unanswered.
 * selected: device, int64 [rows][top_k]; x: device, fp16 [rows][hidden]; both must keep their values until the step is over. */
ABI_API int glm53_pager_publish(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t selected, uint64_t x, void* stream);
/* weights: device, fp16 [rows][top_k]; shared: device, float [rows][hidden], added after the picks, or 0; out: device, float
 * [rows][hidden], may be shared. */
ABI_API int glm53_pager_finish(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t weights, uint64_t shared, uint64_t out,
                               void* stream);
ABI_API int glm53_pager_force(Glm53Pager* pager, uint32_t placement, uint64_t seed); /* PagerPlacement, from the next step on */
ABI_API int glm53_pager_lane_up(const Glm53Pager* pager);
/* JSON, valid until the next call on this thread. */
ABI_API const char* glm53_pager_fast_stats(Glm53Pager* pager);
/* Enqueues on `stream`: the copy of `selected` (device, int64 [rows][top_k]), the request, the wait. Waits itself only while
 * many steps are unanswered: the driver would, with its locks. */
ABI_API int glm53_pager_step(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t selected, void* stream);
/* Waits, with the stepping thread, until every step that was enqueued is answered: the device needs nobody any more to come to its end. To
 * be called before what may wait for the device in the driver. -1 with GLM53_TIMEOUT when the device does not come to a step. */
ABI_API int glm53_pager_catch_up(Glm53Pager* pager, uint64_t timeout_ns);
/* The two halves of a step: the copy and the request, then the wait. */
ABI_API int glm53_pager_ask(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t selected, void* stream);
ABI_API int glm53_pager_wait(Glm53Pager* pager, void* stream);
/* What layer `layer` is thought to pick, while the device waits in the step of the layer before: to be called between the two halves of
 * that step (ask and wait, or publish and finish), once. ids: device, int64 [rows][width], best first, width <= PAGER_HINT_WIDTH; an id
 * that is no expert is skipped. Enqueues a copy and a word, never waits. It moves bytes only: what a step computes does not depend on it.
 */
ABI_API int glm53_pager_hint(Glm53Pager* pager, uint32_t layer, uint32_t rows, uint64_t ids, uint32_t width, void* stream);
/* The device must be idle for the following, as far as decode steps go. */
ABI_API int glm53_pager_put(Glm53Pager* pager, uint32_t record, uint32_t slot); /* the record's bytes are in the slot */
ABI_API int glm53_pager_vacate(Glm53Pager* pager, uint32_t first_slot, uint32_t count);
/* Slots from usable_slots on are given to no record until a higher limit is set; they must be empty. Transit slots stay. */
ABI_API int glm53_pager_limit(Glm53Pager* pager, uint32_t usable_slots);
ABI_API int glm53_pager_flush(Glm53Pager* pager, void* stream); /* enqueues every table that changed */
/* slot_of int32 [num_layers * experts_per_layer], -1: on the host only. */
ABI_API int glm53_pager_where(Glm53Pager* pager, int32_t* slot_of);
/* How hot each record is, as of now: popularity, and fast without its weight (heat.h), float [num_layers * experts_per_layer] each. write:
 * what an earlier run read. */
ABI_API int glm53_pager_heat_read(Glm53Pager* pager, float* slow, float* fast);
ABI_API int glm53_pager_heat_write(Glm53Pager* pager, const float* slow, const float* fast);
/* counters u64[8]: layer steps, picks, hits, distinct records missed, of these admitted, in transit, read in place, bytes copied. -1 when a
 * driver call failed: what is running may be wrong. What was missed and is none of the three went to the CPU lane. */
ABI_API int glm53_pager_stats(Glm53Pager* pager, uint64_t counters[8]);
/* counters u64[6]: distinct records that hints named and that were in no slot; copies begun for them; of these picked by the step that was
 * hinted at with every byte there, picked and finished by that step, not picked; bytes copied before a step asked. */
ABI_API int glm53_pager_hints(Glm53Pager* pager, uint64_t counters[6]);
/* The costs and the split alone, without a device: how many of num_misses records, coldest first, go to the CPU lane. lane_us: [8], one
 * expert with 1..8 rows; job_us < 0: there was no probe. predicted_us: [2], device and lane. */
ABI_API int glm53_pager_split(double kernel_a_us, double kernel_b_us, double link_us, double job_us, const double* lane_us, uint32_t hits,
                              const uint32_t* miss_rows, uint32_t num_misses, double* predicted_us);
/* What jobs that were timed for it say about the lane, without a device: job i had experts[i] experts with rows[i] rows each and took
 * us[i]. rates: [9], what a job costs by itself and an expert with 1..8 rows; in: what was known before (all 0: nothing). */
ABI_API int glm53_pager_rates(const uint32_t* experts, const uint32_t* rows, const double* us, uint32_t num_jobs, double* rates);
/* What the lane is thought to cost after jobs of experts[i] experts with one row took us[i]. rates: [9] as above, in and out. */
ABI_API int glm53_pager_learn(const uint32_t* experts, const double* us, uint32_t num_jobs, double* rates);
/* How well whole decode steps are foretold, without a device: requests of layer[i] with rows[i] rows were seen at now_ns[i] and their layer
 * step was planned to take predicted_us[i]. error_pct: the median over the returned number of steps. */
ABI_API int64_t glm53_pager_forecast(uint32_t num_layers, const uint32_t* layer, const uint32_t* rows, const uint64_t* now_ns,
                                     const double* predicted_us, uint32_t num_requests, double* error_pct);
/* Answers what is outstanding, then ends the thread. */
ABI_API void glm53_pager_close(Glm53Pager* pager);

#ifdef __cplusplus
}
#endif
#endif
