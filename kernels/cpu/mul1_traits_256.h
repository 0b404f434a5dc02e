/* Traits of mul1_band.h for 256-bit vectors. The product with the inputs is left to the file: plain AVX2 or AVX-VNNI. */
#ifndef GLM53_CPU_MUL1_TRAITS_256_H_
#define GLM53_CPU_MUL1_TRAITS_256_H_

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/kernel_ops.h"

namespace glm53 {
namespace {

struct Vectors256 {
  using V = __m256i;
  static constexpr int kTiles = 1;
  static constexpr int kSteps = 8;      /* pairs of states (i, i + 4) */
  static constexpr int kInputWords = 1; /* an input pair for all columns */
  static constexpr int kRowsAtOnce = 4; /* 8 sums, 2 weights, an input and a product: 16 registers have room for no more */

  static GLM53_INLINE void pin(V& v) { __asm__ volatile("" : "+x"(v)); }
  static GLM53_INLINE V load(const uint8_t* at, size_t) { return _mm256_loadu_si256(reinterpret_cast<const V*>(at)); }
  static GLM53_INLINE V load_whole(const uint8_t* at) { return _mm256_load_si256(reinterpret_cast<const V*>(at)); }
  static GLM53_INLINE void store_whole(uint8_t* at, V v) { _mm256_store_si256(reinterpret_cast<V*>(at), v); }
  static GLM53_INLINE V zero() { return _mm256_setzero_si256(); }
  static GLM53_INLINE V set16(int16_t value) { return _mm256_set1_epi16(value); }
  static GLM53_INLINE V set8(int8_t value) { return _mm256_set1_epi8(value); }
  static GLM53_INLINE V broadcast(const int32_t* x) { return _mm256_set1_epi32(*x); }
  static GLM53_INLINE V add16(V a, V b) { return _mm256_add_epi16(a, b); }
  static GLM53_INLINE V mul_low(V a, V b) { return _mm256_mullo_epi16(a, b); }
  static GLM53_INLINE V mul_high(V a, V b) { return _mm256_mulhi_epu16(a, b); }
  static GLM53_INLINE V byte_pairs(V bytes, V ones) { return _mm256_maddubs_epi16(bytes, ones); }
  template <int Shift>
  static GLM53_INLINE V funnel(V upper, V lower) {
    return _mm256_or_si256(_mm256_slli_epi16(upper, Shift), _mm256_srli_epi16(lower, 16 - Shift));
  }
  template <int Mask>
  static GLM53_INLINE V blend32(V a, V b) {
    return _mm256_blend_epi32(a, b, Mask);
  }
  template <int Mask>
  static GLM53_INLINE V blend16(V a, V b) {
    return _mm256_blend_epi16(a, b, Mask);
  }
  static GLM53_INLINE V shuffle(V a, const uint8_t* control) {
    return _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(control))));
  }
  static GLM53_INLINE V unpack_low32(V a, V b) { return _mm256_unpacklo_epi32(a, b); }
  static GLM53_INLINE V unpack_high32(V a, V b) { return _mm256_unpackhi_epi32(a, b); }
  static GLM53_INLINE V unpack_low64(V a, V b) { return _mm256_unpacklo_epi64(a, b); }
  static GLM53_INLINE V unpack_high64(V a, V b) { return _mm256_unpackhi_epi64(a, b); }
  /* Lane l takes lane l - 1, lane 0 takes lane 15. */
  static GLM53_INLINE V move_up(V a) { return _mm256_alignr_epi8(a, _mm256_permute2x128_si256(a, a, 1), 14); }
  static GLM53_INLINE __m256i columns_0_7(V low, V, int) { return low; }
  static GLM53_INLINE __m256i columns_8_15(V, V high, int) { return high; }
};

}  // namespace
}  // namespace glm53

#endif /* GLM53_CPU_MUL1_TRAITS_256_H_ */
