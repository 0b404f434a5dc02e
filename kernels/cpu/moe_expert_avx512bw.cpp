/* AVX-512 F + BW variant: two tiles in a vector. */
#include "cpu/avx2_band.h"
#include "cpu/mul1_band.h"
#include "cpu/mul1_traits_512.h"

namespace {

struct Traits : glm53::Vectors512 {
  static GLM53_INLINE V multiply_add(V sum, V a, V b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
  static GLM53_INLINE void multiply_add_two(V& low, V& high, V a, V b, V x) {
    V p = _mm512_madd_epi16(a, x);
    pin(p);
    V q = _mm512_madd_epi16(b, x);
    pin(q);
    low = _mm512_add_epi32(low, p);
    pin(low);
    high = _mm512_add_epi32(high, q);
    pin(high);
  }
  template <int Shift>
  static GLM53_INLINE V funnel(V upper, V lower) {
    return _mm512_or_si512(_mm512_slli_epi16(upper, Shift), _mm512_srli_epi16(lower, 16 - Shift));
  }
};

void band(const glm53::BandArgs& args) {
  if (args.codebook == MOE_CODEBOOK_MUL1) {
    glm53::band_mul1<Traits>(args);
  } else {
    glm53::band_float_avx2(args);
  }
}

}  // namespace

const glm53::KernelOps glm53::kAvx512BwOps = {prepare_block_avx2, band, finish_block_avx2, activate_block_avx2};
