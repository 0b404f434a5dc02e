/* AVX2 implementation of KernelOps::band, by codebook. */
#ifndef GLM53_CPU_AVX2_BAND_H_
#define GLM53_CPU_AVX2_BAND_H_

#include "cpu/kernel_ops.h"

namespace glm53 {

void band_mul1_avx2(const BandArgs& args);
void band_float_avx2(const BandArgs& args);

}  // namespace glm53

#endif /* GLM53_CPU_AVX2_BAND_H_ */
