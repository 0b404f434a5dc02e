// The dense operations with AVX2 and FMA (this file alone is compiled with them).
#include <immintrin.h>

#define TEXT_NS text_avx2
#define TEXT_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#include "cpu/text_ops_impl.h"
