/* One implementation, compiled once per instruction set: the including file defines TEXT_NS and, where the set has it, TEXT_FMA.
 * Vectors are GCC vectors of 8 floats, which the compiler splits where registers are narrower. */
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/text_ops_table.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // helpers that take vectors by value are always inlined

namespace TEXT_NS {
namespace {

typedef float F8 __attribute__((vector_size(32), aligned(4), may_alias));  // aligned(4): loads from any float address
typedef int32_t I8 __attribute__((vector_size(32)));
#define TEXT_INLINE inline __attribute__((always_inline))

TEXT_INLINE F8 load(const float* p) { return *reinterpret_cast<const F8*>(p); }
TEXT_INLINE void store(float* p, F8 v) { *reinterpret_cast<F8*>(p) = v; }
TEXT_INLINE F8 splat(float v) { return F8{v, v, v, v, v, v, v, v}; }

TEXT_INLINE F8 madd(F8 a, F8 b, F8 c) {
#ifdef TEXT_FMA
  return TEXT_FMA(a, b, c);
#else
  return a * b + c;
#endif
}

// Always the same order, so that a sum does not depend on where it is taken.
TEXT_INLINE float sum(F8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

TEXT_INLINE F8 vmin(F8 a, F8 b) { return a < b ? a : b; }
TEXT_INLINE F8 vmax(F8 a, F8 b) { return a > b ? a : b; }

// exp by x = n ln 2 + r, a degree-6 polynomial on |r| <= ln 2 / 2 (relative error below 3e-7) and exact scaling; saturates beyond +-87.
TEXT_INLINE F8 vexp(F8 x) {
  x = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
  const F8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer, kept in the low bits
  const F8 t = madd(x, splat(1.44269504088896341f), magic);
  const F8 n = t - magic;
  F8 r = madd(n, splat(-0.693359375f), x);
  r = madd(n, splat(2.12194440e-4f), r);
  F8 p = splat(1.38888889e-3f);
  p = madd(p, r, splat(8.33333333e-3f));
  p = madd(p, r, splat(4.16666667e-2f));
  p = madd(p, r, splat(1.66666667e-1f));
  p = madd(p, r, splat(0.5f));
  p = madd(p, r, splat(1.0f));
  p = madd(p, r, splat(1.0f));
  const I8 bits = ((I8)t - 0x4B400000 + 127) << 23;
  return p * (F8)bits;
}

TEXT_INLINE F8 vsigmoid(F8 x) { return splat(1.0f) / (splat(1.0f) + vexp(-x)); }

TEXT_INLINE float sum_of_squares(const float* x, int64_t width) {
  F8 a = splat(0.0f), b = splat(0.0f);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    a = madd(load(x + i), load(x + i), a);
    b = madd(load(x + i + 8), load(x + i + 8), b);
  }
  for (; i < width; i += 8) a = madd(load(x + i), load(x + i), a);
  return sum(a + b);
}

// R rows against V vectors of one panel. The sum over k is one chain per output whatever R and V are: that is the promise of the header.
template <int R, int V>
TEXT_INLINE void linear_block(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t inputs, float* y, int64_t ldy) {
  F8 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = splat(0.0f);
  for (int64_t k = 0; k < inputs; ++k, w += ldw) {
    F8 wv[V];
    for (int v = 0; v < V; ++v) wv[v] = load(w + 8 * v);
    for (int r = 0; r < R; ++r) {
      const F8 xv = splat(x[r * ldx + k]);
      for (int v = 0; v < V; ++v) acc[r][v] = madd(xv, wv[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(y + r * ldy + 8 * v, acc[r][v]);
}

template <int R, int V>
void linear_rows(const float* x, int64_t ldx, const float* w, int64_t columns, int64_t inputs, float* y, int64_t ldy) {
  int64_t c = 0;
  for (; c + 8 * V <= columns; c += 8 * V) linear_block<R, V>(x, ldx, w + c, columns, inputs, y + c, ldy);
  for (; c < columns; c += 8) linear_block<R, 1>(x, ldx, w + c, columns, inputs, y + c, ldy);
}

void linear(const float* x, int64_t ldx, const float* panels, int64_t inputs, int64_t outputs, float* y, int64_t ldy, int64_t tokens) {
  for (int64_t first = 0; first < outputs; first += TEXT_PANEL) {
    const int64_t columns = std::min<int64_t>(TEXT_PANEL, outputs - first);
    const float* w = panels + first * inputs;
    float* out = y + first;
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) linear_rows<4, 2>(x + t * ldx, ldx, w, columns, inputs, out + t * ldy, ldy);
    switch (tokens - t) {
      case 3:
        linear_rows<3, 2>(x + t * ldx, ldx, w, columns, inputs, out + t * ldy, ldy);
        break;
      case 2:
        linear_rows<2, 4>(x + t * ldx, ldx, w, columns, inputs, out + t * ldy, ldy);
        break;
      case 1:
        linear_rows<1, 8>(x + t * ldx, ldx, w, columns, inputs, out + t * ldy, ldy);
        break;
      default:
        break;
    }
  }
}

void rms_norm(const float* x, int64_t ldx, const float* weight, float eps, int64_t width, float* y, int64_t ldy, int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t, x += ldx, y += ldy) {
    const F8 inv = splat(1.0f / std::sqrt(sum_of_squares(x, width) / static_cast<float>(width) + eps));
    for (int64_t i = 0; i < width; i += 8) store(y + i, load(x + i) * inv * load(weight + i));
  }
}

// Sinkhorn on one S x S matrix, rows r and columns c of comb[r * S + c]; scalar, S is 4.
void sinkhorn(float* m, int32_t n, int32_t iters, float eps) {
  for (int32_t it = 0; it < iters; ++it) {
    if (it > 0) {
      for (int32_t r = 0; r < n; ++r) {
        float s = 0.0f;
        for (int32_t c = 0; c < n; ++c) s += m[r * n + c];
        const float inv = 1.0f / (s + eps);
        for (int32_t c = 0; c < n; ++c) m[r * n + c] *= inv;
      }
    }
    for (int32_t c = 0; c < n; ++c) {
      float s = 0.0f;
      for (int32_t r = 0; r < n; ++r) s += m[r * n + c];
      const float inv = 1.0f / (s + eps);
      for (int32_t r = 0; r < n; ++r) m[r * n + c] *= inv;
    }
  }
}

TEXT_INLINE float sigmoid1(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void hyper_mix(const TextHyperSite* site, const float* streams, int64_t tokens, float* y, float* post, float* comb) {
  const int32_t S = site->num_streams;
  const int64_t D = site->hidden, flat = S * D, mix = (2 + S) * S;
  thread_local std::vector<float> logits_buffer;
  logits_buffer.resize(static_cast<size_t>(tokens * mix));
  linear(streams, flat, site->fn_panels, flat, mix, logits_buffer.data(), mix, tokens);
  for (int64_t t = 0; t < tokens; ++t, streams += flat, y += D, post += S, comb += S * S) {
    float* logits = logits_buffer.data() + t * mix;
    const float inv = 1.0f / std::sqrt(sum_of_squares(streams, flat) / static_cast<float>(flat) + site->norm_eps);
    float pre[16];
    for (int32_t s = 0; s < S; ++s) {
      pre[s] = sigmoid1(logits[s] * inv * site->scale[0] + site->base[s]) + site->eps;
      post[s] = 2.0f * sigmoid1(logits[S + s] * inv * site->scale[1] + site->base[S + s]);
    }
    for (int32_t r = 0; r < S; ++r) {
      float* row = comb + r * S;
      float top = -INFINITY, total = 0.0f;
      for (int32_t c = 0; c < S; ++c) {
        row[c] = logits[2 * S + r * S + c] * inv * site->scale[2] + site->base[2 * S + r * S + c];
        top = std::max(top, row[c]);
      }
      for (int32_t c = 0; c < S; ++c) total += row[c] = std::exp(row[c] - top);
      for (int32_t c = 0; c < S; ++c) row[c] = row[c] / total + site->eps;
    }
    sinkhorn(comb, S, site->sinkhorn_iters, site->eps);
    for (int64_t i = 0; i < D; i += 8) {
      F8 v = splat(pre[0]) * load(streams + i);
      for (int32_t s = 1; s < S; ++s) v = madd(splat(pre[s]), load(streams + s * D + i), v);
      store(y + i, v);
    }
    rms_norm(y, D, site->sublayer_norm, site->sublayer_eps, D, y, D, 1);
  }
}

void hyper_apply(int64_t S, int64_t D, const float* post, const float* comb, const float* y, const float* y2, float* streams,
                 int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t, post += S, comb += S * S, y += D, streams += S * D) {
    for (int64_t i = 0; i < D; i += 8) {
      F8 old[16];
      for (int64_t s = 0; s < S; ++s) old[s] = load(streams + s * D + i);
      F8 v = load(y + i);
      if (y2 != nullptr) v = v + load(y2 + t * D + i);
      for (int64_t s = 0; s < S; ++s) {
        F8 n = splat(post[s]) * v;
        for (int64_t r = 0; r < S; ++r) n = madd(splat(comb[r * S + s]), old[r], n);
        store(streams + s * D + i, n);
      }
    }
  }
}

// Causal convolution and SiLU over the last `taps` inputs of q, k, v; the window moves on by one token.
void kda_conv(const TextKda* l, const float* x, float* window, float* out) {
  const int64_t width = 3LL * l->num_heads * l->head_dim;
  const int32_t past = l->conv_kernel - 1;
  for (int64_t i = 0; i < width; i += 8) {
    F8 v = load(x + i) * load(l->conv + past * width + i);
    for (int32_t j = 0; j < past; ++j) v = madd(load(window + j * width + i), load(l->conv + j * width + i), v);
    store(out + i, v * vsigmoid(v));
  }
  if (past > 1) std::memmove(window, window + width, static_cast<size_t>((past - 1) * width) * sizeof(float));
  if (past > 0) std::memcpy(window + (past - 1) * width, x, static_cast<size_t>(width) * sizeof(float));
}

// decay[i] = exp(forget gate), the per-channel factor of the recurrent state.
void kda_decay(const TextKda* l, const float* forget, float* decay) {
  const int64_t dim = l->head_dim;
  for (int32_t h = 0; h < l->num_heads; ++h) {
    const F8 rate = splat(l->a_exp[h]);
    for (int64_t i = h * dim; i < (h + 1) * dim; i += 8) {
      const F8 g = load(forget + i) + load(l->dt_bias + i);
      if (l->has_lower_bound) {
        store(decay + i, vexp(splat(l->lower_bound) * vsigmoid(rate * g)));
      } else {
        F8 soft;
        for (int j = 0; j < 8; ++j) soft[j] = g[j] > 20.0f ? g[j] : std::log(1.0f + std::exp(g[j]));
        store(decay + i, vexp(-rate * soft));
      }
    }
  }
}

TEXT_INLINE void scale_to_unit(float* x, int64_t dim, float extra) {
  const F8 inv = splat(extra / std::sqrt(sum_of_squares(x, dim) + 1e-6f));
  for (int64_t i = 0; i < dim; i += 8) store(x + i, load(x + i) * inv);
}

// One head, one token: S <- diag(decay) S; S += k (v - k^T S) beta; out = q^T S. Values go in strips of 64 that stay in registers.
void kda_head(int64_t dim, const float* q, const float* k, const float* v, const float* decay, float beta, float* state, float* out) {
  constexpr int kStrip = 8;
  for (int64_t c = 0; c < dim; c += 8 * kStrip) {
    F8 memory[kStrip], delta[kStrip], result[kStrip];
    for (int j = 0; j < kStrip; ++j) memory[j] = result[j] = splat(0.0f);
    for (int64_t r = 0; r < dim; ++r) {
      float* row = state + r * dim + c;
      const F8 d = splat(decay[r]), kr = splat(k[r]);
      for (int j = 0; j < kStrip; ++j) {
        const F8 s = load(row + 8 * j) * d;
        store(row + 8 * j, s);
        memory[j] = madd(s, kr, memory[j]);
      }
    }
    for (int j = 0; j < kStrip; ++j) delta[j] = (load(v + c + 8 * j) - memory[j]) * splat(beta);
    for (int64_t r = 0; r < dim; ++r) {
      float* row = state + r * dim + c;
      const F8 qr = splat(q[r]), kr = splat(k[r]);
      for (int j = 0; j < kStrip; ++j) {
        const F8 s = madd(kr, delta[j], load(row + 8 * j));
        store(row + 8 * j, s);
        result[j] = madd(s, qr, result[j]);
      }
    }
    for (int j = 0; j < kStrip; ++j) store(out + c + 8 * j, result[j]);
  }
}

void kda(const TextKda* l, const float* qkv, int64_t ld_qkv, const float* forget, int64_t ld_forget, const float* beta, int64_t ld_beta,
         const float* gate, int64_t ld_gate, const int64_t* seg_tokens, int64_t num_segments, float* const* conv_state,
         float* const* recurrent, float* out) {
  const int64_t dim = l->head_dim, width = l->num_heads * dim;
  thread_local std::vector<float> buffer;
  buffer.resize(static_cast<size_t>(4 * width));
  float *mixed = buffer.data(), *decay = mixed + 3 * width;
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int64_t s = 0; s < num_segments; ++s) {
    for (int64_t t = 0; t < seg_tokens[s]; ++t) {
      kda_conv(l, qkv, conv_state[s], mixed);
      kda_decay(l, forget, decay);
      for (int64_t h = 0; h < l->num_heads; ++h) {
        float *q = mixed + h * dim, *k = q + width, *v = k + width, *o = out + h * dim;
        scale_to_unit(q, dim, query_scale);
        scale_to_unit(k, dim, 1.0f);
        kda_head(dim, q, k, v, decay + h * dim, sigmoid1(beta[h]), recurrent[s] + h * dim * dim, o);
        rms_norm(o, dim, l->o_norm, l->norm_eps, dim, o, dim, 1);
        for (int64_t i = 0; i < dim; i += 8) store(o + i, load(o + i) * vsigmoid(load(gate + h * dim + i)));
      }
      qkv += ld_qkv;
      forget += ld_forget;
      beta += ld_beta;
      gate += ld_gate;
      out += width;
    }
  }
}

// a[i] summed over its lanes becomes lane i: three rounds of pairwise adds, always in the same order.
TEXT_INLINE F8 sum_lanes(const F8* a) {
  F8 two[4], four[2];
  for (int i = 0; i < 4; ++i)
    two[i] = __builtin_shuffle(a[2 * i], a[2 * i + 1], I8{0, 8, 2, 10, 4, 12, 6, 14}) +
             __builtin_shuffle(a[2 * i], a[2 * i + 1], I8{1, 9, 3, 11, 5, 13, 7, 15});
  for (int i = 0; i < 2; ++i)
    four[i] = __builtin_shuffle(two[2 * i], two[2 * i + 1], I8{0, 1, 8, 9, 4, 5, 12, 13}) +
              __builtin_shuffle(two[2 * i], two[2 * i + 1], I8{2, 3, 10, 11, 6, 7, 14, 15});
  return __builtin_shuffle(four[0], four[1], I8{0, 1, 2, 3, 8, 9, 10, 11}) +
         __builtin_shuffle(four[0], four[1], I8{4, 5, 6, 7, 12, 13, 14, 15});
}

// Running softmax of one query and head over tiles of kTile positions.
constexpr int64_t kTile = 64;
struct MlaPair {
  float top, total;
  float* acc;  // [rank], not yet divided by total
};

// Scores of 8 neighbouring positions.
TEXT_INLINE F8 mla_scores(const float* q, const float* latents, int64_t rank) {
  F8 acc[8];
  for (int i = 0; i < 8; ++i) acc[i] = splat(0.0f);
  for (int64_t d = 0; d < rank; d += 8) {
    const F8 qd = load(q + d);
    for (int i = 0; i < 8; ++i) acc[i] = madd(qd, load(latents + i * rank + d), acc[i]);
  }
  return sum_lanes(acc);
}

template <int V>
TEXT_INLINE void mla_values(const float* p, const float* latents, int64_t rank, int64_t count, float* out) {
  F8 acc[V];
  for (int v = 0; v < V; ++v) acc[v] = load(out + 8 * v);
  for (int64_t i = 0; i < count; ++i, latents += rank) {
    const F8 pi = splat(p[i]);
    for (int v = 0; v < V; ++v) acc[v] = madd(pi, load(latents + 8 * v), acc[v]);
  }
  for (int v = 0; v < V; ++v) store(out + 8 * v, acc[v]);
}

// Adds `count` positions of a tile. Tiles are cut at multiples of kTile from the stream's start, so the order of all sums depends on
// positions alone, not on how the prompt was cut into chunks.
void mla_tile(const float* q, const float* tile, int64_t rank, int64_t count, float scaling, MlaPair* pair) {
  float p[kTile];
  const int64_t blocks = (count + 7) / 8;
  F8 top8 = splat(-INFINITY);
  for (int64_t b = 0; b < blocks; ++b) {
    F8 s = mla_scores(q, tile + 8 * b * rank, rank) * splat(scaling);
    for (int64_t i = count - 8 * b; i < 8; ++i) s[i] = -INFINITY;
    top8 = vmax(top8, s);
    store(p + 8 * b, s);
  }
  float top = pair->top;
  for (int i = 0; i < 8; ++i) top = std::max(top, top8[i]);
  if (top > pair->top) {
    const float shrink = vexp(splat(pair->top - top))[0];
    pair->total *= shrink;
    for (int64_t r = 0; r < rank; r += 8) store(pair->acc + r, load(pair->acc + r) * splat(shrink));
    pair->top = top;
  }
  F8 total = splat(0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    F8 v = vexp(load(p + 8 * b) - splat(top));
    for (int64_t i = count - 8 * b; i < 8; ++i) v[i] = 0.0f;  // vexp saturates: what lies behind the end must count nothing
    store(p + 8 * b, v);
    total = total + v;
  }
  pair->total += sum(total);
  int64_t r = 0;
  for (; r + 64 <= rank; r += 64) mla_values<8>(p, tile + r, rank, count, pair->acc + r);
  for (; r < rank; r += 8) mla_values<1>(p, tile + r, rank, count, pair->acc + r);
}

// A few queries at a time share every tile that is read from memory.
constexpr int64_t kQueries = 8;

void mla_queries(int64_t heads, int64_t rank, float scaling, const float* q, const float* latents, int64_t past, int64_t num_queries,
                 std::vector<MlaPair>* pairs, std::vector<float>* acc, float* out) {
  acc->assign(static_cast<size_t>(num_queries * heads * rank), 0.0f);
  pairs->resize(static_cast<size_t>(num_queries * heads));
  for (int64_t i = 0; i < num_queries * heads; ++i) (*pairs)[i] = {-INFINITY, 0.0f, acc->data() + i * rank};
  for (int64_t start = 0; start < past + num_queries; start += kTile)
    for (int64_t i = 0; i < num_queries; ++i) {
      const int64_t count = std::min(kTile, past + i + 1 - start);
      if (count <= 0) continue;
      for (int64_t h = i * heads; h < (i + 1) * heads; ++h)
        mla_tile(q + h * rank, latents + start * rank, rank, count, scaling, pairs->data() + h);
    }
  for (const MlaPair& pair : *pairs) {
    const F8 inv = splat(1.0f / pair.total);
    for (int64_t r = 0; r < rank; r += 8, out += 8) store(out, load(pair.acc + r) * inv);
  }
}

void mla(int64_t heads, int64_t rank, float scaling, const float* q, const float* latent, int64_t ld_latent, const int64_t* seg_tokens,
         const int64_t* seg_past, int64_t num_segments, float* const* latents, float* out) {
  thread_local std::vector<MlaPair> pairs;
  thread_local std::vector<float> acc;
  for (int64_t s = 0; s < num_segments; ++s) {
    const int64_t past = seg_past[s], tokens = seg_tokens[s];
    for (int64_t t = 0; t < tokens; ++t, latent += ld_latent)
      std::memcpy(latents[s] + (past + t) * rank, latent, static_cast<size_t>(rank) * sizeof(float));
    for (int64_t t = 0; t < tokens; t += kQueries) {
      const int64_t count = std::min(kQueries, tokens - t);
      mla_queries(heads, rank, scaling, q, latents[s], past + t, count, &pairs, &acc, out);
      q += count * heads * rank;
      out += count * heads * rank;
    }
  }
}

void route(const float* x, const float* gate_panels, const float* bias, int64_t hidden, int64_t num_experts, int64_t top_k, float scaling,
           int32_t normalise, int64_t tokens, int64_t* selected, float* weights) {
  float score[1024], choice[1024];
  for (int64_t t = 0; t < tokens; ++t, selected += top_k, weights += top_k) {
    linear(x + t * hidden, hidden, gate_panels, hidden, num_experts, score, num_experts, 1);
    for (int64_t e = 0; e < num_experts; e += 8) {
      const F8 s = vsigmoid(load(score + e));
      store(score + e, s);
      store(choice + e, s + load(bias + e));
    }
    float total = 0.0f;
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t best = 0;
      for (int64_t e = 1; e < num_experts; ++e)
        if (choice[e] > choice[best]) best = e;
      choice[best] = -INFINITY;
      selected[k] = best;
      weights[k] = score[best];
      total += score[best];
    }
    const float factor = normalise ? scaling / (total + 1e-20f) : scaling;
    for (int64_t k = 0; k < top_k; ++k) weights[k] *= factor;
  }
}

void swiglu(const float* gate_up, int64_t inter, float limit, float* out, int64_t tokens) {
  const F8 top = splat(limit > 0.0f ? limit : INFINITY);
  for (int64_t t = 0; t < tokens; ++t, gate_up += 2 * inter, out += inter)
    for (int64_t i = 0; i < inter; i += 8) {
      const F8 g = load(gate_up + i);
      store(out + i, vmin(g * vsigmoid(g), top) * vmin(vmax(load(gate_up + inter + i), -top), top));
    }
}

void hyper_head(const float* streams, int64_t num_streams, int64_t hidden, const float* norm, float eps, float* y, int64_t tokens) {
  const F8 share = splat(1.0f / static_cast<float>(num_streams));
  for (int64_t t = 0; t < tokens; ++t, streams += num_streams * hidden, y += hidden) {
    for (int64_t i = 0; i < hidden; i += 8) {
      F8 v = load(streams + i);
      for (int64_t s = 1; s < num_streams; ++s) v = v + load(streams + s * hidden + i);
      store(y + i, v * share);
    }
    rms_norm(y, hidden, norm, eps, hidden, y, hidden, 1);
  }
}

}  // namespace

extern const TextOps kOps;
const TextOps kOps = {linear, rms_norm, hyper_mix, hyper_apply, kda, mla, route, swiglu, hyper_head};

}  // namespace TEXT_NS
