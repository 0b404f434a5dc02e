#ifndef GLM53_CPU_SHAPE_H_
#define GLM53_CPU_SHAPE_H_

#include "moe_expert.h"

namespace glm53 {

/* One of an expert's matrices: its size, bits per weight and the offsets of its parts in the record. */
struct LinearParts {
  const char* name;
  uint32_t in_features, out_features, k;
  uint32_t trellis, suh, svh, bias;
};

static inline bool is_gateless(const MoeExpertShape& s) { return s.gate_trellis == MOE_ABSENT; }
LinearParts gate_parts(const MoeExpertShape& s);
LinearParts up_parts(const MoeExpertShape& s);
LinearParts down_parts(const MoeExpertShape& s);

/* 0 when every part lies inside the record and every field is known; otherwise -1 and a message that names the field. */
int check_shape(const MoeExpertShape& s);

}  // namespace glm53

#endif /* GLM53_CPU_SHAPE_H_ */
