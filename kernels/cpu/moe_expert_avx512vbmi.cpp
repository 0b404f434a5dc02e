/* AVX-512 VNNI + VBMI variant: two tiles in a vector, a state is one funnel shift (VBMI2), and the product with the inputs and its
 * addition are one instruction. */
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

void band(const glm53::BandArgs& args) {
  if (args.codebook == MOE_CODEBOOK_MUL1) {
    glm53::band_mul1<Traits>(args);
  } else {
    glm53::band_float_avx2(args);
  }
}

}  // namespace

const glm53::KernelOps glm53::kAvx512VbmiOps = {prepare_block_avx2, band, finish_block_avx2, activate_block_avx2};
