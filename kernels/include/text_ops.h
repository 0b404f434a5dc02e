/* The dense part of a glm5_next text model on the CPU: everything of a decoder layer but the routed experts.
 *
 * Plain fp32, raw pointers, no torch. Every function treats the rows of its input one by one: a row's result does not depend on how many
 * rows stand beside it. So a token's logits are the same bits in a prefill chunk, alone or in a batch, and greedy answers do not depend on
 * who else is being served. (Bits differ between instruction sets: only routed experts promise more, see docs/arithmetic.md.)
 *
 * Rows are "tokens". A forward pass works on segments: segment s owns the next seg_tokens[s] rows, which continue one stream whose state
 * (convolution window, recurrent state, latents) is given by one pointer per segment. All widths are multiples of 8.
 */
#ifndef GLM53_TEXT_OPS_H_
#define GLM53_TEXT_OPS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TEXT_API __attribute__((visibility("default")))

/* Positions are read in groups of this many, see text_mla. A capacity is a multiple of it. */
#define TEXT_POSITIONS 8
/* Columns of one weight panel, see text_pack. */
#define TEXT_PANEL 64

/* Instruction set that the functions below use: "avx2" or "base"; the best that this host has unless text_ops_select named one. */
TEXT_API const char* text_ops_isa(void);
/* Uses "avx2", "base" or "auto" from now on; not while another thread computes. 0, or -1 when this host lacks it. */
TEXT_API int text_ops_select(const char* isa);

/* Packs w [inputs][outputs] into panels of up to 64 columns, each stored [inputs][columns], which is the order text_linear reads.
 * panels holds inputs * outputs floats. outputs is a multiple of 8. */
TEXT_API void text_pack(const float* w, int64_t inputs, int64_t outputs, float* panels);

/* y[t][n] = sum_k x[t][k] * w[k][n] for packed w; ldx and ldy are row strides in floats. */
TEXT_API void text_linear(const float* x, int64_t ldx, const float* panels, int64_t inputs, int64_t outputs, float* y, int64_t ldy,
                          int64_t tokens);

/* y = x * rsqrt(mean(x^2) + eps) * weight */
TEXT_API void text_rms_norm(const float* x, int64_t ldx, const float* weight, float eps, int64_t width, float* y, int64_t ldy,
                            int64_t tokens);

/* Manifold-constrained hyper-connections: one site's weights. */
typedef struct TextHyperSite {
  const float* fn_panels; /* packed [streams * hidden][(2 + streams) * streams] */
  const float* base;      /* [(2 + streams) * streams] */
  float scale[3];         /* pre, post, comb */
  float norm_eps, eps;
  int32_t sinkhorn_iters;
  int32_t num_streams; /* 4 */
  int64_t hidden;
  const float* sublayer_norm; /* [hidden]: the RMS norm that stands before the sublayer */
  float sublayer_eps;
} TextHyperSite;

/* From the residual streams [tokens][S][hidden]: y = sublayer_norm(sum_s pre_s * stream_s), and post [tokens][S], comb [tokens][S][S] for
 * text_hyper_apply. */
TEXT_API void text_hyper_mix(const TextHyperSite* site, const float* streams, int64_t tokens, float* y, float* post, float* comb);

/* stream_s <- post_s * (y + y2) + sum_r comb[r][s] * stream_r, in place. y2 may be NULL. */
TEXT_API void text_hyper_apply(int64_t num_streams, int64_t hidden, const float* post, const float* comb, const float* y, const float* y2,
                               float* streams, int64_t tokens);

/* Kimi delta attention of one layer, without its projections. */
typedef struct TextKda {
  int32_t num_heads, head_dim; /* head_dim is a multiple of 64 */
  int32_t conv_kernel;         /* taps of the causal convolution over q, k, v */
  int32_t has_lower_bound;     /* 1: decay = exp(lower_bound * sigmoid(.)), 0: decay = exp(-exp(A_log) * softplus(.)) */
  float lower_bound, norm_eps;
  const float* conv;    /* [conv_kernel][3 * width], width = num_heads * head_dim */
  const float* dt_bias; /* [width] */
  const float* a_exp;   /* [num_heads]: exp(A_log) */
  const float* o_norm;  /* [head_dim] */
} TextKda;

/* qkv [tokens][3 * width], forget [tokens][width] (before dt_bias), beta [tokens][num_heads] (before the sigmoid), gate [tokens][width].
 * State per segment: conv_state [conv_kernel - 1][3 * width] (the last inputs), recurrent [num_heads][head_dim key][head_dim value].
 * out [tokens][width]. */
TEXT_API void text_kda(const TextKda* layer, const float* qkv, int64_t ld_qkv, const float* forget, int64_t ld_forget, const float* beta,
                       int64_t ld_beta, const float* gate, int64_t ld_gate, const int64_t* seg_tokens, int64_t num_segments,
                       float* const* conv_state, float* const* recurrent, float* out);

/* Latent attention over all earlier tokens of the segment's stream. Queries are already in the latents' space and every head reads the same
 * latents as keys and as values, so a token of context costs one latent.
 * q [tokens][heads][rank], latent [tokens][rank] with row stride ld_latent. State per segment: past tokens seg_past[s], latents
 * [capacity][rank], capacity a multiple of TEXT_POSITIONS. The new latents are appended first (the caller made room).
 * out [tokens][heads][rank]. */
TEXT_API void text_mla(int64_t heads, int64_t rank, float scaling, const float* q, const float* latent, int64_t ld_latent,
                       const int64_t* seg_tokens, const int64_t* seg_past, int64_t num_segments, float* const* latents, float* out);

/* Sigmoid router: the top_k experts by sigmoid(x w) + bias, best first (the lower index wins a tie), weights sigmoid / sum * scaling.
 * selected int64 [tokens][top_k], weights [tokens][top_k]. num_experts is a multiple of 8 and at most 1024. */
TEXT_API void text_route(const float* x, const float* gate_panels, const float* bias, int64_t hidden, int64_t num_experts, int64_t top_k,
                         float scaling, int32_t normalise, int64_t tokens, int64_t* selected, float* weights);

/* out[t][i] = min(silu(g), limit) * clamp(u, -limit, limit), g = gate_up[t][i], u = gate_up[t][inter + i]; limit 0 = no clamp.
 * The clamp stands after the activation, as in the checkpoint's own runtime. */
TEXT_API void text_swiglu(const float* gate_up, int64_t inter, float limit, float* out, int64_t tokens);

/* y[t] = rms_norm(mean over streams) */
TEXT_API void text_hyper_head(const float* streams, int64_t num_streams, int64_t hidden, const float* norm, float eps, float* y,
                              int64_t tokens);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_TEXT_OPS_H_ */
