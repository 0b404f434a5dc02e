#ifndef GLM53_CPU_SELF_TEST_H_
#define GLM53_CPU_SELF_TEST_H_

#include "cpu/kernel_ops.h"
#include "moe_expert.h"

namespace glm53 {

struct SelfTest {
  bool same_bits;                        /* as the scalar kernel, for the three codebooks, K = 1..8 and 1..8 rows */
  double scalar_us;                      /* a small MUL1 expert, one row */
  double candidate_us[MOE_MAX_ROWS + 1]; /* the same expert, by number of rows */
};

SelfTest run_self_test(const KernelOps& candidate);

/* Microseconds of one band of the shape's up matrix, by number of rows (us[1..MOE_MAX_ROWS]). */
bool time_shape(const KernelOps& ops, const MoeExpertShape& shape, double* us);

}  // namespace glm53

#endif /* GLM53_CPU_SELF_TEST_H_ */
