/* AVX-512 VNNI + VBMI variant. The product with the inputs and its addition are one instruction. Native records of 2, 3 and 4 bits: one
 * byte permutation brings eight lanes' bits into quadwords, one multishift cuts four states out of each. Others: two tiles in a vector, a
 * state is one funnel shift (VBMI2). */
#include "cpu/avx2_band.h"
#include "cpu/mul1_band.h"
#include "cpu/mul1_traits_512.h"

namespace {

struct Traits : glm53::Vectors512 {
  static GLM53_INLINE V multiply_add(V sum, V a, V b) { return _mm512_dpwssd_epi32(sum, a, b); }
  static GLM53_INLINE void multiply_add_two(V& low, V& high, V a, V b, V x) {
    low = multiply_add(low, a, x);
    pin(low);
    high = multiply_add(high, b, x);
    pin(high);
  }
  template <int Shift>
  static GLM53_INLINE V funnel(V upper, V lower) {
    return _mm512_shldi_epi16(upper, lower, Shift);
  }
};

struct Lanes : Traits {
  static constexpr int kTiles = 1;
  static constexpr int kSteps = 4;      /* states i, i + 1, i + 4 and i + 5 of eight lanes, twice */
  static constexpr int kInputWords = 4; /* input pairs of an even and of an odd lane, each for both columns */

  static GLM53_INLINE V broadcast(const int32_t* x) { return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(x))); }
  static GLM53_INLINE V cut(V control, const uint8_t* quadwords) { return _mm512_multishift_epi64_epi8(control, load_whole(quadwords)); }
  static GLM53_INLINE V load_bytes(const uint8_t* at) { return _mm512_loadu_si512(at); }
  static GLM53_INLINE V load_last_word(V a, const uint8_t* at) { return _mm512_mask_loadu_epi32(a, 0x8000, at); }
  static GLM53_INLINE V permute_bytes(const uint8_t* places, V a) { return _mm512_permutexvar_epi8(load_whole(places), a); }
  static GLM53_INLINE __m256i columns_0_7(V low, V high, int) { return gather(low, high, 0); }
  static GLM53_INLINE __m256i columns_8_15(V low, V high, int) { return gather(low, high, 1); }

 private:
  /* The sums of a column's two lanes, which are neighbours: lanes 0..7 are of columns 0..3 and 8..11. */
  static GLM53_INLINE __m256i gather(V low, V high, int first) {
    const __m256i at = _mm256_add_epi32(_mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), _mm256_set1_epi32(first));
    const V sums = _mm512_permutex2var_epi32(both(low), _mm512_castsi256_si512(at), both(high));
    return _mm512_castsi512_si256(sums);
  }
  static GLM53_INLINE V both(V a) { return _mm512_add_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_BADC)); }
};

void band(const glm53::BandArgs& args) {
  if (args.codebook != MOE_CODEBOOK_MUL1) {
    glm53::band_float_avx2(args);
  } else if (!glm53::band_mul1_lanes<Lanes>(args)) {
    glm53::band_mul1<Traits>(args);
  }
}

}  // namespace

const glm53::KernelOps glm53::kAvx512VbmiOps = {prepare_block_avx2, band, finish_block_avx2, activate_block_avx2};
