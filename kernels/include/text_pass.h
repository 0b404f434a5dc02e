/* A forward pass of the dense part (text_ops.h) as one call: the caller writes down once what a pass computes, in order, and then runs it
 * for whatever rows a pass has. Python would take the interpreter's lock back after each of some hundred short calls a token, and wait for
 * it whenever another thread has work.
 */
#ifndef GLM53_TEXT_PASS_H_
#define GLM53_TEXT_PASS_H_

#include "text_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The function of text_ops.h that a call stands for, less its arguments that belong to the pass: tokens, and the segments with their state.
 */
enum TextOp {
  TEXT_OP_LINEAR = 0,  /* x, ldx, panels, inputs, outputs, y, ldy */
  TEXT_OP_RMS_NORM,    /* x, ldx, weight, eps, width, y, ldy */
  TEXT_OP_HYPER_MIX,   /* site, streams, y, post, comb */
  TEXT_OP_HYPER_APPLY, /* num_streams, hidden, post, comb, y, y2, streams */
  TEXT_OP_KDA,         /* layer, qkv, ld_qkv, forget, ld_forget, beta, ld_beta, gate, ld_gate, state layer, out */
  TEXT_OP_MLA,         /* heads, rank, scaling, q, latent, ld_latent, state layer, out */
  TEXT_OP_ROUTE,       /* x, gate_panels, bias, hidden, num_experts, top_k, scaling, normalise, selected, weights */
  TEXT_OP_SWIGLU,      /* gate_up, inter, limit, out */
  TEXT_OP_EXPERTS,     /* layer, top_k, x, selected, weights, out */
  TEXT_OP_LOGITS,      /* streams, num_streams, hidden, norm, eps, x (scratch), panels, inputs, outputs */
  TEXT_OP_COUNT
};

#define TEXT_MAX_ARGS 12

typedef union TextArg {
  int64_t integer;
  float number;
  void* pointer;
} TextArg;

typedef struct TextCall {
  int64_t op; /* TextOp */
  TextArg args[TEXT_MAX_ARGS];
} TextCall;

/* What one pass works on. A state table is [layers of its kind][num_segments]. */
typedef struct TextRows {
  int64_t tokens, num_segments;
  const int64_t* seg_tokens;
  const int64_t* seg_past;
  float* const* conv_state;
  float* const* recurrent;
  float* const* latents;
  float* logits;    /* [rows][outputs of TEXT_OP_LOGITS]: of every row, or of each segment's last one */
  int32_t prefill;  /* passed on to the experts */
  int32_t all_rows; /* logits of every row */
} TextRows;

/* Evaluates routed experts: glm53_tier_forward, with the tier engine as context. 0, or what text_run then returns. */
typedef int (*TextExperts)(void* context, uint32_t layer, uint32_t rows, uint32_t top_k, const float* x, const int64_t* selected,
                           const float* weights, int prefill, float* out);

/* Runs the calls in order. `progress` grows by one with each; any thread may read it. Returns 0, the first failure of `experts`, or -2 for
 * an op that there is not; what stands after it has not run. */
TEXT_API int text_run(const TextCall* calls, int64_t num_calls, const TextRows* rows, TextExperts experts, void* context,
                      int64_t* progress);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_TEXT_PASS_H_ */
