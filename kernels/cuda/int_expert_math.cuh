/* The fp32 steps of docs/arithmetic.md for one warp that holds a block of 128 numbers, four consecutive ones a lane.
 *
 * Compiled with -fmad=false: an fma is one only where fmaf is written. Divisions round to nearest and subnormals are kept (nvcc's
 * -prec-div=true and -ftz=false, which are its defaults and are stated in the build).
 */
#ifndef GLM53_CUDA_INT_EXPERT_MATH_CUH_
#define GLM53_CUDA_INT_EXPERT_MATH_CUH_

#include <cuda_fp16.h>
#include <stdint.h>

#include "moe_expert.h"

namespace glm53 {

constexpr uint32_t kBlock = 128;
constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
constexpr float kInvSqrt128 = 0x1.6a09e6p-4f;
constexpr float kQuantMax = 32639.0f;
constexpr uint32_t kSmallestBits = 0x17800000u; /* 2^-80 */
constexpr uint32_t kInfinityBits = 0x7F800000u;

struct Four {
  float v[4];
};

/* Step 2 for the warp's 128 numbers. Strides 1 and 2 lie inside a lane, 4..64 between lanes. */
__device__ __forceinline__ void hadamard128(Four& x, uint32_t lane) {
  const float a = x.v[0] + x.v[1], b = x.v[0] - x.v[1], c = x.v[2] + x.v[3], d = x.v[2] - x.v[3];
  x.v[0] = a + c;
  x.v[1] = b + d;
  x.v[2] = a - c;
  x.v[3] = b - d;
#pragma unroll
  for (uint32_t mask = 1; mask < 32; mask <<= 1) {
    const bool upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(kFullWarp, x.v[i], mask);
      x.v[i] = upper ? other - x.v[i] : x.v[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x.v[i] *= kInvSqrt128;
}

/* Four fp16 numbers at an 8-byte aligned address. */
__device__ __forceinline__ Four load_halves(const __half* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  return {{low.x, low.y, high.x, high.y}};
}

__device__ __forceinline__ Four load_floats(const float* from) {
  const float4 x = __ldcg(reinterpret_cast<const float4*>(from));
  return {{x.x, x.y, x.z, x.w}};
}

__device__ __forceinline__ void store_floats(float* to, const Four& x) {
  *reinterpret_cast<float4*>(to) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

__device__ __forceinline__ Four times(const Four& a, const Four& b) {
  return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}};
}

/* Step 3. The lane gets its four q as two words of signed bytes, q = 256 * high + low, and the block's scale and sum. */
struct QuantisedFour {
  uint32_t high, low;
  float scale;
  int32_t sum;
};

__device__ __forceinline__ QuantisedFour quantise(const Four& h) {
  uint32_t largest = 0; /* magnitudes compare as integers; a NaN comes out above every number */
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(h.v[i]) & 0x7FFFFFFFu);
  largest = __reduce_max_sync(kFullWarp, largest);
  if (largest < kSmallestBits) return {0, 0, 0.0f, 0};
  if (largest >= kInfinityBits) return {0, 0, __uint_as_float(0x7FC00000u), 0};
  const float m = __uint_as_float(largest);
  const float r = __fdiv_rn(kQuantMax, m);
  QuantisedFour out = {0, 0, __fdiv_rn(m, kQuantMax), 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float rounded = fmaxf(fminf(rintf(h.v[i] * r), kQuantMax), -kQuantMax);
    const int32_t q = static_cast<int32_t>(rounded);
    const int32_t low = static_cast<int8_t>(q & 255);
    out.sum += q;
    out.low |= static_cast<uint32_t>(low & 255) << (8 * i);
    out.high |= static_cast<uint32_t>(((q - low) >> 8) & 255) << (8 * i);
  }
  out.sum = __reduce_add_sync(kFullWarp, out.sum);
  return out;
}

__device__ __forceinline__ float power_of_two(int32_t n) { return __int_as_float((n + 127) << 23); }

__device__ __forceinline__ float exp_(float x) {
  if (x != x) return x;
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float n = rintf(x * 0x1.715476p+0f);
  float r = fmaf(-n, 0x1.62e43p-1f, x);
  r = fmaf(-n, -0x1.05c61p-29f, r);
  float p = fmaf(0x1.6a2318p-10f, r, 0x1.123a8ep-7f);
  p = fmaf(p, r, 0x1.5558f6p-5f);
  p = fmaf(p, r, 0x1.55549p-3f);
  p = fmaf(p, r, 0x1.fffffcp-2f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  const int32_t whole = static_cast<int32_t>(n);
  const int32_t first = whole >> 1;
  return p * power_of_two(first) * power_of_two(whole - first);
}

__device__ __forceinline__ float sigmoid_(float x) { return __fdiv_rn(1.0f, 1.0f + exp_(-x)); }
/* Comparisons are written so that a NaN passes through. */
__device__ __forceinline__ float at_most(float value, float limit) { return value > limit ? limit : value; }
__device__ __forceinline__ float at_least(float value, float limit) { return value < limit ? limit : value; }

/* The first factor of step 7. */
template <int Activation>
__device__ __forceinline__ float activate_gate(float limit, float g) {
  if constexpr (Activation == MOE_ACT_SWIGLU_OAI) {
    if (limit != 0.0f) g = at_most(g, limit);
    return g * sigmoid_(g * 0x1.b3b646p+0f);
  }
  float value;
  if constexpr (Activation == MOE_ACT_SILU) {
    value = g * sigmoid_(g);
  } else if constexpr (Activation == MOE_ACT_GELU) {
    value = g * sigmoid_((g * 0x1.988454p+0f) * fmaf(g * g, 0x1.6e4e26p-5f, 1.0f));
  } else {
    const float positive = g < 0.0f ? 0.0f : g;
    value = positive * positive;
  }
  return limit != 0.0f ? at_most(value, limit) : value;
}

/* Step 7 for four numbers: g becomes a. Without a gate, u is NULL and g is what the up matrix gave. */
template <int Activation>
__device__ __forceinline__ void activate_four(float limit, Four& g, const Four* u) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    g.v[i] = activate_gate<Activation>(limit, g.v[i]);
    if (u == nullptr) continue;
    float up = u->v[i];
    if (limit != 0.0f) up = at_least(at_most(up, limit), -limit);
    if constexpr (Activation == MOE_ACT_SWIGLU_OAI) up += 1.0f;
    g.v[i] *= up;
  }
}

__device__ __forceinline__ void activate(uint32_t activation, float limit, Four& g, const Four* u) {
  if (activation == MOE_ACT_SILU) {
    activate_four<MOE_ACT_SILU>(limit, g, u);
  } else if (activation == MOE_ACT_GELU) {
    activate_four<MOE_ACT_GELU>(limit, g, u);
  } else if (activation == MOE_ACT_SWIGLU_OAI) {
    activate_four<MOE_ACT_SWIGLU_OAI>(limit, g, u);
  } else {
    activate_four<MOE_ACT_RELU2>(limit, g, u);
  }
}

}  // namespace glm53

#endif /* GLM53_CUDA_INT_EXPERT_MATH_CUH_ */
