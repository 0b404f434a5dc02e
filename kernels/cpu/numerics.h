/* Scalar building blocks of docs/arithmetic.md that every variant shares: number formats, the Hadamard transform, exp_, activations.
 *
 * All functions are static: a file compiled with AVX2 must not hand its copy of an inline function to the linker, which would run it on
 * hosts without AVX2. For the same reason nothing here uses a template of the standard library.
 */
#ifndef GLM53_CPU_NUMERICS_H_
#define GLM53_CPU_NUMERICS_H_

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace glm53 {

constexpr uint32_t kBlock = 128;                /* inputs of one scale, outputs of one Hadamard */
constexpr uint32_t kBlockTiles = kBlock / 16;   /* tiles along one side of a block */
constexpr float kInvSqrt128 = 0x1.6a09e6p-4f;   /* bits 0x3DB504F3 */
constexpr float kQuantMax = 32639.0f;           /* 127 * 256 + 127: splits into two signed bytes */
constexpr uint32_t kSmallestBits = 0x17800000u; /* 2^-80: a block whose largest magnitude is smaller counts as zero */
constexpr float kTwoPow17Inv = 0x1p-17f;

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float quiet_nan() { return bits_float(0x7FC00000u); }

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u;
  const uint32_t mantissa = half & 1023u;
  if (exponent == 31u) return bits_float(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0u) return bits_float(sign | float_bits(static_cast<float>(mantissa) * 0x1p-24f));
  return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

/* Round to nearest even. Only finite values below the fp16 limit come here (codebook weights). */
static inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude < 0x38800000u) {                                     /* below 2^-14: subnormal */
    const float steps = nearbyintf(bits_float(magnitude) * 0x1p24f); /* exact scaling, one rounding */
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(steps));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

/* The result of every kernel assumes round to nearest even, subnormals kept and no trap. A caller (PyTorch can) may have set the thread
 * to flush subnormals, so the state is set on the way in and given back on the way out. */
class FloatStateGuard {
 public:
  FloatStateGuard() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80u); }
  ~FloatStateGuard() { _mm_setcsr(saved_); }
  FloatStateGuard(const FloatStateGuard&) = delete;
  FloatStateGuard& operator=(const FloatStateGuard&) = delete;

 private:
  uint32_t saved_;
};

/* Step 2: butterflies with strides 1, 2, 4, ..., 64, then one multiply. */
static inline void hadamard128(float* v) {
  for (uint32_t stride = 1; stride < kBlock; stride *= 2) {
    for (uint32_t base = 0; base < kBlock; base += 2 * stride) {
      for (uint32_t i = base; i < base + stride; ++i) {
        const float a = v[i];
        const float b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
    }
  }
  for (uint32_t i = 0; i < kBlock; ++i) v[i] *= kInvSqrt128;
}

/* exp_: see docs/arithmetic.md for the derivation of the coefficients. */
constexpr float kExpLow = -104.0f;
constexpr float kExpHigh = 89.0f;
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.62e43p-1f;
constexpr float kLn2Low = -0x1.05c61p-29f;
constexpr float kExp2 = 0x1.fffffcp-2f;
constexpr float kExp3 = 0x1.555490p-3f;
constexpr float kExp4 = 0x1.5558f6p-5f;
constexpr float kExp5 = 0x1.123a8ep-7f;
constexpr float kExp6 = 0x1.6a2318p-10f;

/* 2^n as a float, -126 <= n <= 127. */
static inline float power_of_two(int32_t n) { return bits_float(static_cast<uint32_t>(n + 127) << 23); }

static inline float exp_(float x) {
  if (x != x) return x;
  x = x < kExpLow ? kExpLow : x;
  x = x > kExpHigh ? kExpHigh : x;
  const float n = nearbyintf(x * kLog2E);
  float r = fmaf(-n, kLn2High, x);
  r = fmaf(-n, kLn2Low, r);
  float p = fmaf(kExp6, r, kExp5);
  p = fmaf(p, r, kExp4);
  p = fmaf(p, r, kExp3);
  p = fmaf(p, r, kExp2);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  /* Two exact factors instead of one: 2^n itself may lie outside the normal range. Only the last product can round. */
  const int32_t whole = static_cast<int32_t>(n);
  const int32_t first = whole >> 1;
  return p * power_of_two(first) * power_of_two(whole - first);
}

static inline float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

constexpr float kGeluCubic = 0.044715f;
constexpr float kGeluSlope = 1.5957691216057308f; /* 2 * sqrt(2 / pi) */
constexpr float kOaiSlope = 1.702f;

static inline float silu_(float g) { return g * sigmoid_(g); }

/* The tanh form of GELU, written with a sigmoid: (1 + tanh z) / 2 = sigmoid(2 z). */
static inline float gelu_(float g) { return g * sigmoid_((g * kGeluSlope) * fmaf(g * g, kGeluCubic, 1.0f)); }

static inline float relu2_(float g) {
  const float positive = g < 0.0f ? 0.0f : g; /* a NaN stays */
  return positive * positive;
}

/* Comparisons are written so that a NaN passes through. */
static inline float at_most(float value, float limit) { return value > limit ? limit : value; }
static inline float at_least(float value, float limit) { return value < limit ? limit : value; }

}  // namespace glm53

#endif /* GLM53_CPU_NUMERICS_H_ */
