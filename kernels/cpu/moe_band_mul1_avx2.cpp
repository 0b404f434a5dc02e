/* MUL1 sums in AVX2. */
#include "cpu/avx2_band.h"
#include "cpu/mul1_band.h"
#include "cpu/mul1_traits_256.h"

namespace {

struct Avx2 : glm53::Vectors256 {
  static GLM53_INLINE V multiply_add(V sum, V a, V b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
  static GLM53_INLINE void multiply_add_two(V& low, V& high, V a, V b, V x) {
    V p = _mm256_madd_epi16(a, x);
    pin(p);
    V q = _mm256_madd_epi16(b, x);
    pin(q);
    low = _mm256_add_epi32(low, p);
    pin(low);
    high = _mm256_add_epi32(high, q);
    pin(high);
  }
};

}  // namespace

void glm53::band_mul1_avx2(const BandArgs& args) { band_mul1<Avx2>(args); }
