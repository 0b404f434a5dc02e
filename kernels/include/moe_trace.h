/* Windows into the expert arithmetic for golden files and tests. A server needs none of this. */
#ifndef GLM53_MOE_TRACE_H_
#define GLM53_MOE_TRACE_H_

#include "moe_expert.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The intermediates of one matrix: `in` inputs, `out` outputs, `rows` rows, row-major. No pointer is NULL. */
typedef struct MoeLinearTrace {
  float* v;     /* [rows][in] inputs times suh */
  float* h;     /* [rows][in] after the Hadamard transform */
  float* scale; /* [rows][in / 128] */
  int16_t* q;   /* [rows][in] */
  float* z;     /* [rows][out] sums, before the output transform */
  float* out;   /* [rows][out] result of the matrix */
} MoeLinearTrace;

typedef struct MoeTrace {
  MoeLinearTrace gate; /* untouched when the expert has no gate matrix */
  MoeLinearTrace up;
  MoeLinearTrace down;
  float* a; /* [rows][inter] input of the down matrix */
} MoeTrace;

/* Evaluates one task of 1..MOE_MAX_ROWS rows in the calling thread and leaves every intermediate in trace, besides the result. */
MOE_API int moe_trace(uint32_t variant, const MoeTask* task, const MoeTrace* trace);
/* y[i] = exp_(x[i]). */
MOE_API void moe_exp(const float* x, float* y, size_t count);
/* Step 7 on count values (a multiple of 128) with a variant's code; g is NULL for an expert without a gate. */
MOE_API int moe_activate(uint32_t variant, uint32_t activation, float limit, const float* g, const float* u, float* a, size_t count);
/* Which variant a pool would take on a host with these features, and why: features is a mask of 1 << MoeVariant. Writes at most
 * reason_size bytes with the terminator. */
MOE_API uint32_t moe_explain_choice(uint32_t features, char* reason, size_t reason_size);

/* Overrides how a pool cuts its work. splits: parts of a band's groups, 1, 2 or 4, 0 = by the number of units. inline_cost: calls below
 * this many weights run in the calling thread (see pool.cpp); 0 shares every call. */
MOE_API int moe_pool_force(MoePool* pool, uint32_t splits, double inline_cost);
/* How long its threads poll before they sleep, from their next wait on; moe_hot_ns (moe_host.h) says it otherwise. */
MOE_API void moe_pool_force_hot(MoePool* pool, int64_t hot_ns);
/* moe_hot_ns where `usable` CPUs may be used. */
MOE_API int64_t moe_hot_ns_among(uint32_t num_threads, uint32_t num_pinned, uint32_t usable);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_MOE_TRACE_H_ */
