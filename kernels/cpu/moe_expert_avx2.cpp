/* AVX2 + FMA + F16C variant: transforms, quantisation and activations. The matrix part is in moe_band_*_avx2.cpp. */
#include <immintrin.h>
#include <string.h>

#include "cpu/avx2_band.h"
#include "cpu/kernel_ops.h"
#include "cpu/numerics.h"
#include "moe_expert.h"

namespace {

using namespace glm53;

constexpr int kVectors = kBlock / 8;

__m256 load_halves_as_floats(const uint16_t* halves) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves))); }

/* (a + b, a - b) inside a vector: the partner comes by a shuffle and the lanes of b change sign. */
__m256 butterfly(__m256 values, __m256 partners, __m256i sign) {
  return _mm256_add_ps(partners, _mm256_xor_ps(values, _mm256_castsi256_ps(sign)));
}

void hadamard(__m256* v) {
  const int32_t minus = INT32_MIN;
  const __m256i sign1 = _mm256_setr_epi32(0, minus, 0, minus, 0, minus, 0, minus);
  const __m256i sign2 = _mm256_setr_epi32(0, 0, minus, minus, 0, 0, minus, minus);
  const __m256i sign4 = _mm256_setr_epi32(0, 0, 0, 0, minus, minus, minus, minus);
  for (int i = 0; i < kVectors; ++i) {
    __m256 x = v[i];
    x = butterfly(x, _mm256_permute_ps(x, 0xB1), sign1);
    x = butterfly(x, _mm256_permute_ps(x, 0x4E), sign2);
    v[i] = butterfly(x, _mm256_permute2f128_ps(x, x, 1), sign4);
  }
  for (int stride = 1; stride < kVectors; stride *= 2) {
    for (int i = 0; i < kVectors; ++i) {
      if (i & stride) continue;
      const __m256 a = v[i];
      const __m256 b = v[i + stride];
      v[i] = _mm256_add_ps(a, b);
      v[i + stride] = _mm256_sub_ps(a, b);
    }
  }
  const __m256 norm = _mm256_set1_ps(kInvSqrt128);
  for (int i = 0; i < kVectors; ++i) v[i] = _mm256_mul_ps(v[i], norm);
}

uint32_t largest_of(__m256i values) {
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4E));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
}

int32_t sum_of(__m256i values) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4E));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0xB1));
  return _mm_cvtsi128_si32(x);
}

void quantise(const __m256* h, int16_t* q, float* scale, int32_t* sum) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i largest = _mm256_setzero_si256(); /* magnitudes compare as integers, and a NaN comes out above every number */
  for (int i = 0; i < kVectors; ++i) largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(h[i]), magnitude));
  const uint32_t bits = largest_of(largest);
  if (bits < kSmallestBits || bits >= 0x7F800000u) {
    *scale = bits < kSmallestBits ? 0.0f : quiet_nan();
    *sum = 0;
    memset(q, 0, kBlock * sizeof(int16_t));
    return;
  }
  const float m = bits_float(bits);
  *scale = m / kQuantMax;
  const __m256 r = _mm256_set1_ps(kQuantMax / m);
  const __m256i high = _mm256_set1_epi16(32639);
  const __m256i low = _mm256_set1_epi16(-32639);
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < kVectors; i += 2) {
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(h[i], r));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(h[i + 1], r));
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
    packed = _mm256_max_epi16(_mm256_min_epi16(packed, high), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 8 * i), packed);
    total = _mm256_add_epi32(total, _mm256_madd_epi16(packed, _mm256_set1_epi16(1)));
  }
  *sum = sum_of(total);
}

void store(const __m256* v, float* to) {
  for (int i = 0; i < kVectors; ++i) _mm256_storeu_ps(to + 8 * i, v[i]);
}

void prepare_block(const void* x, uint32_t x_dtype, const uint16_t* suh, int16_t* q, float* scale, int32_t* sum, const BlockTrace* trace) {
  __m256 v[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    const __m256 value = x_dtype == MOE_DTYPE_F16 ? load_halves_as_floats(static_cast<const uint16_t*>(x) + 8 * i)
                                                  : _mm256_loadu_ps(static_cast<const float*>(x) + 8 * i);
    v[i] = _mm256_mul_ps(value, load_halves_as_floats(suh + 8 * i));
  }
  if (trace != nullptr) store(v, trace->v);
  hadamard(v);
  if (trace != nullptr) store(v, trace->h);
  quantise(v, q, scale, sum);
}

void finish_block(const float* z, const uint16_t* svh, const uint16_t* bias, float* out) {
  __m256 v[kVectors];
  for (int i = 0; i < kVectors; ++i) v[i] = _mm256_loadu_ps(z + 8 * i);
  hadamard(v);
  for (int i = 0; i < kVectors; ++i) {
    __m256 y = _mm256_mul_ps(v[i], load_halves_as_floats(svh + 8 * i));
    if (bias != nullptr) y = _mm256_add_ps(y, load_halves_as_floats(bias + 8 * i));
    _mm256_storeu_ps(out + 8 * i, y);
  }
}

__m256 constant(float value) { return _mm256_set1_ps(value); }

/* 2^n, -126 <= n <= 127. */
__m256 powers_of_two(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }

/* vminps and vmaxps return their second operand when either is a NaN: the value stands there, so that a NaN passes. */
__m256 at_most8(__m256 value, __m256 limit) { return _mm256_min_ps(limit, value); }
__m256 at_least8(__m256 value, __m256 limit) { return _mm256_max_ps(limit, value); }

__m256 exp8(__m256 x) {
  x = at_most8(at_least8(x, constant(kExpLow)), constant(kExpHigh));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, constant(kLog2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, constant(kLn2High), x);
  r = _mm256_fnmadd_ps(n, constant(kLn2Low), r);
  __m256 p = _mm256_fmadd_ps(constant(kExp6), r, constant(kExp5));
  p = _mm256_fmadd_ps(p, r, constant(kExp4));
  p = _mm256_fmadd_ps(p, r, constant(kExp3));
  p = _mm256_fmadd_ps(p, r, constant(kExp2));
  p = _mm256_fmadd_ps(p, r, constant(1.0f));
  p = _mm256_fmadd_ps(p, r, constant(1.0f));
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i first = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(p, powers_of_two(first)), powers_of_two(_mm256_sub_epi32(whole, first)));
}

__m256 sigmoid8(__m256 x) {
  const __m256 one = constant(1.0f);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_xor_ps(x, constant(-0.0f)))));
}

template <uint32_t Activation>
__m256 activated(__m256 g, float limit) {
  if constexpr (Activation == MOE_ACT_SWIGLU_OAI) {
    if (limit != 0.0f) g = at_most8(g, constant(limit));
    return _mm256_mul_ps(g, sigmoid8(_mm256_mul_ps(g, constant(kOaiSlope))));
  }
  __m256 value;
  if constexpr (Activation == MOE_ACT_SILU) {
    value = _mm256_mul_ps(g, sigmoid8(g));
  } else if constexpr (Activation == MOE_ACT_GELU) {
    const __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(g, g), constant(kGeluCubic), constant(1.0f));
    value = _mm256_mul_ps(g, sigmoid8(_mm256_mul_ps(_mm256_mul_ps(g, constant(kGeluSlope)), cubic)));
  } else {
    const __m256 positive = at_least8(g, _mm256_setzero_ps());
    value = _mm256_mul_ps(positive, positive);
  }
  return limit != 0.0f ? at_most8(value, constant(limit)) : value;
}

template <uint32_t Activation>
void activate_all(float limit, const float* g, const float* u, float* a) {
  for (uint32_t i = 0; i < kBlock; i += 8) {
    __m256 up = _mm256_loadu_ps(u + i);
    if (g == nullptr) {
      _mm256_storeu_ps(a + i, activated<Activation>(up, limit));
      continue;
    }
    if (limit != 0.0f) up = at_least8(at_most8(up, constant(limit)), constant(-limit));
    if constexpr (Activation == MOE_ACT_SWIGLU_OAI) up = _mm256_add_ps(up, constant(1.0f));
    _mm256_storeu_ps(a + i, _mm256_mul_ps(activated<Activation>(_mm256_loadu_ps(g + i), limit), up));
  }
}

void activate_block(uint32_t activation, float limit, const float* g, const float* u, float* a) {
  switch (activation) {
    case MOE_ACT_SILU:
      return activate_all<MOE_ACT_SILU>(limit, g, u, a);
    case MOE_ACT_GELU:
      return activate_all<MOE_ACT_GELU>(limit, g, u, a);
    case MOE_ACT_SWIGLU_OAI:
      return activate_all<MOE_ACT_SWIGLU_OAI>(limit, g, u, a);
    default:
      return activate_all<MOE_ACT_RELU2>(limit, g, u, a);
  }
}

void band(const BandArgs& args) {
  if (args.codebook == MOE_CODEBOOK_MUL1) {
    band_mul1_avx2(args);
  } else {
    band_float_avx2(args);
  }
}

}  // namespace

void glm53::prepare_block_avx2(const void* x, uint32_t x_dtype, const uint16_t* suh, int16_t* q, float* scale, int32_t* sum,
                               const BlockTrace* trace) {
  prepare_block(x, x_dtype, suh, q, scale, sum, trace);
}
void glm53::finish_block_avx2(const float* z, const uint16_t* svh, const uint16_t* bias, float* out) { finish_block(z, svh, bias, out); }
void glm53::activate_block_avx2(uint32_t activation, float limit, const float* g, const float* u, float* a) {
  activate_block(activation, limit, g, u, a);
}

const glm53::KernelOps glm53::kAvx2Ops = {prepare_block, band, finish_block, activate_block};
