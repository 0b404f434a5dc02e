/* AVX2 implementation of KernelOps::band, by codebook. */
#ifndef GLM53_CPU_AVX2_BAND_H_
#define GLM53_CPU_AVX2_BAND_H_

#include "cpu/kernel_ops.h"

namespace glm53 {

void band_mul1_avx2(const BandArgs& args);
void band_float_avx2(const BandArgs& args);

/* The stages around the sums. Variants with wider vectors use them too: they are a few percent of an expert's time. */
void prepare_block_avx2(const void* x, uint32_t x_dtype, const uint16_t* suh, int16_t* q, float* scale, int32_t* sum,
                        const BlockTrace* trace);
void finish_block_avx2(const float* z, const uint16_t* svh, const uint16_t* bias, float* out);
void activate_block_avx2(uint32_t activation, float limit, const float* g, const float* u, float* a);

}  // namespace glm53

#endif /* GLM53_CPU_AVX2_BAND_H_ */
