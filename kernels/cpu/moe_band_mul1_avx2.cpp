/* MUL1 sums in AVX2. */
#include "cpu/avx2_band.h"
#include "cpu/mul1_band.h"
#include "cpu/mul1_traits_256.h"

namespace {

struct Avx2 : glm53::Vectors256 {
  static GLM53_INLINE V multiply_add(V sum, V a, V b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
};

}  // namespace

void glm53::band_mul1_avx2(const BandArgs& args) { band_mul1<Avx2>(args); }
