/* What a variant implements: the four stages of docs/arithmetic.md on one block or one 128-column band. expert.cpp puts them in order, so
 * that order is written once and every variant shares it. */
#ifndef GLM53_CPU_KERNEL_OPS_H_
#define GLM53_CPU_KERNEL_OPS_H_

#include <stdint.h>

namespace glm53 {

#define GLM53_INLINE __attribute__((always_inline)) inline

constexpr uint32_t kGroups = 4; /* groups of input blocks that are summed by themselves (step 5) */

/* A band's work: rows x (the inputs of some groups of a matrix) -> rows x 128 sums for each group. */
struct BandArgs {
  const uint16_t* trellis; /* of the whole matrix */
  uint32_t in_blocks;      /* inputs / 128 */
  uint32_t out_tiles;      /* outputs / 16 */
  uint32_t k;
  uint32_t codebook;
  uint32_t layout;                 /* MoeLayout */
  uint32_t band;                   /* columns band * 128 .. + 127 */
  uint32_t first_group, end_group; /* groups first_group .. end_group - 1 of kGroups */
  uint32_t rows;                   /* 1..MOE_MAX_ROWS */
  const int16_t* q;                /* [rows][in_blocks * 128] quantised inputs */
  const float* scale;              /* [rows][in_blocks] */
  const int32_t* sum;              /* [rows][in_blocks] sum of q over the block */
  float* groups;                   /* [kGroups][rows][128]: the result, only the groups asked for are written */
  void* scratch;                   /* kBandScratchBytes of the calling thread, 64-byte aligned */
};
constexpr uint32_t kBandScratchBytes = 64u * 1024u;

/* Where prepare_block leaves its intermediates when a test asks for them, else NULL. */
struct BlockTrace {
  float* v; /* [128] after suh */
  float* h; /* [128] after the Hadamard transform */
};

struct KernelOps {
  /* Steps 1-3 on one block of 128 inputs. x: MoeDtype values; suh: fp16 bits. */
  void (*prepare_block)(const void* x, uint32_t x_dtype, const uint16_t* suh, int16_t* q, float* scale, int32_t* sum,
                        const BlockTrace* trace);
  /* Step 4 for some groups of one band. */
  void (*band)(const BandArgs& args);
  /* Step 6 on one block of 128 outputs. bias: fp16 bits or NULL. out may be z. */
  void (*finish_block)(const float* z, const uint16_t* svh, const uint16_t* bias, float* out);
  /* Step 7 on 128 values. g is NULL for an expert without a gate matrix. */
  void (*activate_block)(uint32_t activation, float limit, const float* g, const float* u, float* a);
};

/* Blocks of an input are summed in four groups of this length (step 5). */
static inline uint32_t group_blocks(uint32_t in_blocks) { return (in_blocks + kGroups - 1) / kGroups; }

extern const KernelOps kScalarOps;
extern const KernelOps kAvx2Ops;
extern const KernelOps kAvx512BwOps;
extern const KernelOps kAvx512VbmiOps;
extern const KernelOps kAvxVnniOps;

}  // namespace glm53

#endif /* GLM53_CPU_KERNEL_OPS_H_ */
