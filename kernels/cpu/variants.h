/* The variants of the expert kernel: which are built, which this host can run, which one a pool takes. */
#ifndef GLM53_CPU_VARIANTS_H_
#define GLM53_CPU_VARIANTS_H_

#include <stdint.h>

#include <string>

#include "cpu/kernel_ops.h"
#include "moe_expert.h"

namespace glm53 {

struct Choice {
  uint32_t variant;                       /* of one row */
  const KernelOps* ops[MOE_MAX_ROWS + 1]; /* by number of rows, 1..MOE_MAX_ROWS; NULL: the variant that was asked for cannot run here */
  bool automatic;                         /* timed: tune_choice may change it */
  std::string reason;
};

/* A mask of 1 << MoeVariant: what the CPU has and the operating system saves. */
uint32_t host_features();
const KernelOps* variant_ops(uint32_t variant);
/* AUTO takes, for each number of rows, the fastest variant that gives the scalar kernel's bits in a short self-test. */
Choice choose_variant(uint32_t requested, uint32_t features);
/* Times the eligible variants on a band of this shape, for each number of rows, and takes the fastest. Does nothing to a choice that was
 * requested by name. About 0.1 s a variant. */
void tune_choice(Choice& choice, const MoeExpertShape& shape);

}  // namespace glm53

#endif /* GLM53_CPU_VARIANTS_H_ */
