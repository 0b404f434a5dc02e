/* Traits of mul1_band.h for 512-bit vectors: the halves are two neighbouring tiles. The funnel shift and the product with the inputs are
 * left to the file. */
#ifndef GLM53_CPU_MUL1_TRAITS_512_H_
#define GLM53_CPU_MUL1_TRAITS_512_H_

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "cpu/kernel_ops.h"

namespace glm53 {
namespace {

struct Vectors512 {
  using V = __m512i;
  static constexpr int kTiles = 2;
  static constexpr int kSteps = 8;      /* pairs of states (i, i + 4) */
  static constexpr int kInputWords = 1; /* an input pair for all columns */
  static constexpr int kRowsAtOnce = 8; /* 16 of the 32 registers hold sums */

  static GLM53_INLINE void pin(V& v) { __asm__ volatile("" : "+v"(v)); }
  static GLM53_INLINE V load(const uint8_t* at, size_t next) {
    const V left = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    return _mm512_inserti64x4(left, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + next)), 1);
  }
  static GLM53_INLINE V load_whole(const uint8_t* at) { return _mm512_load_si512(at); }
  static GLM53_INLINE void store_whole(uint8_t* at, V v) { _mm512_store_si512(at, v); }
  static GLM53_INLINE V zero() { return _mm512_setzero_si512(); }
  static GLM53_INLINE V set16(int16_t value) { return _mm512_set1_epi16(value); }
  static GLM53_INLINE V set8(int8_t value) { return _mm512_set1_epi8(value); }
  static GLM53_INLINE V broadcast(const int32_t* x) { return _mm512_set1_epi32(*x); }
  static GLM53_INLINE V add16(V a, V b) { return _mm512_add_epi16(a, b); }
  static GLM53_INLINE V mul_low(V a, V b) { return _mm512_mullo_epi16(a, b); }
  static GLM53_INLINE V mul_high(V a, V b) { return _mm512_mulhi_epu16(a, b); }
  static GLM53_INLINE V byte_pairs(V bytes, V ones) { return _mm512_maddubs_epi16(bytes, ones); }
  /* Masks are those of a 256-bit half. */
  template <int Mask>
  static GLM53_INLINE V blend32(V a, V b) {
    return _mm512_mask_blend_epi32(static_cast<__mmask16>(Mask * 0x101), a, b);
  }
  template <int Mask>
  static GLM53_INLINE V blend16(V a, V b) {
    return _mm512_mask_blend_epi16(static_cast<__mmask32>(Mask * 0x01010101u), a, b);
  }
  static GLM53_INLINE V shuffle(V a, const uint8_t* control) {
    return _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(control))));
  }
  static GLM53_INLINE V unpack_low32(V a, V b) { return _mm512_unpacklo_epi32(a, b); }
  static GLM53_INLINE V unpack_high32(V a, V b) { return _mm512_unpackhi_epi32(a, b); }
  static GLM53_INLINE V unpack_low64(V a, V b) { return _mm512_unpacklo_epi64(a, b); }
  static GLM53_INLINE V unpack_high64(V a, V b) { return _mm512_unpackhi_epi64(a, b); }
  /* In each half, lane l takes lane l - 1 and lane 0 takes lane 15. */
  static GLM53_INLINE V move_up(V a) { return _mm512_alignr_epi8(a, _mm512_shuffle_i64x2(a, a, 0xB1), 14); }
  static GLM53_INLINE __m256i columns_0_7(V low, V, int tile) { return part(low, tile); }
  static GLM53_INLINE __m256i columns_8_15(V, V high, int tile) { return part(high, tile); }

 private:
  static GLM53_INLINE __m256i part(V a, int half) { return half == 0 ? _mm512_castsi512_si256(a) : _mm512_extracti64x4_epi64(a, 1); }
};

}  // namespace
}  // namespace glm53

#endif /* GLM53_CPU_MUL1_TRAITS_512_H_ */
