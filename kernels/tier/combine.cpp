#include <cmath>

#include "cpu/numerics.h"
#include "tier/device.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace glm53 {
namespace {

void combine_tail(float* out, const float* const* rows, const float* weights, uint32_t top_k, uint32_t first, uint32_t hidden) {
  for (uint32_t i = first; i < hidden; ++i) {
    float sum = 0.0f;
    for (uint32_t k = 0; k < top_k; ++k) {
      if (rows[k] != nullptr) sum = std::fma(weights[k], rows[k][i], sum);
    }
    out[i] = sum;
  }
}

#if defined(__x86_64__)
// An fma rounds once wherever it runs: eight at a time give the bits of one at a time.
__attribute__((target("avx2,fma"))) uint32_t combine_avx2(float* out, const float* const* rows, const float* weights, uint32_t top_k,
                                                          uint32_t hidden) {
  uint32_t i = 0;
  for (; i + 8 <= hidden; i += 8) {
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t k = 0; k < top_k; ++k) {
      if (rows[k] != nullptr) sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[k]), _mm256_loadu_ps(rows[k] + i), sum);
    }
    _mm256_storeu_ps(out + i, sum);
  }
  return i;
}
#endif

}  // namespace

void combine_rows(float* out, const float* const* rows, const float* weights, uint32_t top_k, uint32_t hidden) {
  const FloatStateGuard guard;  // the caller may flush denormals: the bits must not depend on that
  uint32_t first = 0;
#if defined(__x86_64__)
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_fma) first = combine_avx2(out, rows, weights, top_k, hidden);
#endif
  combine_tail(out, rows, weights, top_k, first, hidden);
}

}  // namespace glm53
