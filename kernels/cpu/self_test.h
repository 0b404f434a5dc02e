#ifndef GLM53_CPU_SELF_TEST_H_
#define GLM53_CPU_SELF_TEST_H_

#include "cpu/kernel_ops.h"

namespace glm53 {

struct SelfTest {
  bool same_bits;   /* every codebook, 1 and 8 rows: output equals the scalar kernel's */
  double scalar_us; /* best time of one row through a 256 x 128 MUL1 expert at 3 bits */
  double candidate_us;
};

/* Less than 0.1 s: runs a small made-up expert through both kernels. */
SelfTest run_self_test(const KernelOps& candidate);

}  // namespace glm53

#endif /* GLM53_CPU_SELF_TEST_H_ */
