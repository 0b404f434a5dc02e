// Picks the instruction set once and forwards.
#include "include/text_ops.h"

#include <algorithm>
#include <cstring>

#include "cpu/text_ops_table.h"

namespace {

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const TextOps& best() { return has_avx2() ? text_avx2::kOps : text_base::kOps; }

const TextOps* chosen = nullptr;

const TextOps& ops() {
  if (chosen == nullptr) chosen = &best();
  return *chosen;
}

}  // namespace

const char* text_ops_isa(void) { return &ops() == &text_avx2::kOps ? "avx2" : "base"; }

int text_ops_select(const char* isa) {
  if (std::strcmp(isa, "auto") == 0) {
    chosen = &best();
  } else if (std::strcmp(isa, "base") == 0) {
    chosen = &text_base::kOps;
  } else if (std::strcmp(isa, "avx2") == 0 && has_avx2()) {
    chosen = &text_avx2::kOps;
  } else {
    return -1;
  }
  return 0;
}

void text_pack(const float* w, int64_t inputs, int64_t outputs, float* panels) {
  for (int64_t first = 0; first < outputs; first += TEXT_PANEL) {
    const int64_t columns = std::min<int64_t>(TEXT_PANEL, outputs - first);
    for (int64_t k = 0; k < inputs; ++k) panels = std::copy_n(w + k * outputs + first, columns, panels);
  }
}

void text_linear(const float* x, int64_t ldx, const float* panels, int64_t inputs, int64_t outputs, float* y, int64_t ldy, int64_t tokens) {
  ops().linear(x, ldx, panels, inputs, outputs, y, ldy, tokens);
}

void text_rms_norm(const float* x, int64_t ldx, const float* weight, float eps, int64_t width, float* y, int64_t ldy, int64_t tokens) {
  ops().rms_norm(x, ldx, weight, eps, width, y, ldy, tokens);
}

void text_hyper_mix(const TextHyperSite* site, const float* streams, int64_t tokens, float* y, float* post, float* comb) {
  ops().hyper_mix(site, streams, tokens, y, post, comb);
}

void text_hyper_apply(int64_t num_streams, int64_t hidden, const float* post, const float* comb, const float* y, const float* y2,
                      float* streams, int64_t tokens) {
  ops().hyper_apply(num_streams, hidden, post, comb, y, y2, streams, tokens);
}

void text_kda(const TextKda* layer, const float* qkv, int64_t ld_qkv, const float* forget, int64_t ld_forget, const float* beta,
              int64_t ld_beta, const float* gate, int64_t ld_gate, const int64_t* seg_tokens, int64_t num_segments,
              float* const* conv_state, float* const* recurrent, float* out) {
  ops().kda(layer, qkv, ld_qkv, forget, ld_forget, beta, ld_beta, gate, ld_gate, seg_tokens, num_segments, conv_state, recurrent, out);
}

void text_mla(int64_t heads, int64_t rank, float scaling, const float* q, const float* latent, int64_t ld_latent, const int64_t* seg_tokens,
              const int64_t* seg_past, int64_t num_segments, float* const* latents, float* out) {
  ops().mla(heads, rank, scaling, q, latent, ld_latent, seg_tokens, seg_past, num_segments, latents, out);
}

void text_route(const float* x, const float* gate_panels, const float* bias, int64_t hidden, int64_t num_experts, int64_t top_k,
                float scaling, int32_t normalise, int64_t tokens, int64_t* selected, float* weights) {
  ops().route(x, gate_panels, bias, hidden, num_experts, top_k, scaling, normalise, tokens, selected, weights);
}

void text_swiglu(const float* gate_up, int64_t inter, float limit, float* out, int64_t tokens) {
  ops().swiglu(gate_up, inter, limit, out, tokens);
}

void text_hyper_head(const float* streams, int64_t num_streams, int64_t hidden, const float* norm, float eps, float* y, int64_t tokens) {
  ops().hyper_head(streams, num_streams, hidden, norm, eps, y, tokens);
}
