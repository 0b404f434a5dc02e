/* AVX-VNNI variant, for client processors without AVX-512: the product with the inputs and its addition are one instruction. */
#include "cpu/avx2_band.h"
#include "cpu/mul1_band.h"
#include "cpu/mul1_traits_256.h"

namespace {

struct Traits : glm53::Vectors256 {
  static GLM53_INLINE V multiply_add(V sum, V a, V b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
  static GLM53_INLINE void multiply_add_two(V& low, V& high, V a, V b, V x) {
    low = multiply_add(low, a, x);
    pin(low);
    high = multiply_add(high, b, x);
    pin(high);
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

const glm53::KernelOps glm53::kAvxVnniOps = {prepare_block_avx2, band, finish_block_avx2, activate_block_avx2};
