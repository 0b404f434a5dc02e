/* One expert for up to 8 rows: the order of the stages, independent of the variant. */
#ifndef GLM53_CPU_EXPERT_H_
#define GLM53_CPU_EXPERT_H_

#include <stddef.h>

#include "cpu/kernel_ops.h"
#include "moe_expert.h"
#include "moe_trace.h"

namespace glm53 {

/* Scratch memory of one thread. It grows to the largest expert seen and is then reused: a call allocates nothing. */
class Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  /* False when memory is short. */
  bool reserve(const MoeExpertShape& shape);

 private:
  friend class Evaluation;
  struct Quantised {
    int16_t* q;
    float* scale;
    int32_t* sum;
  };
  void place(uint32_t hidden, uint32_t inter);

  char* memory_ = nullptr;
  size_t bytes_ = 0;
  uint32_t hidden_ = 0, inter_ = 0;
  Quantised gate_ = {}, up_ = {}, down_ = {};
  float *g_ = nullptr, *u_ = nullptr, *a_ = nullptr;
  void* band_scratch_ = nullptr;
};

/* Evaluates rows first_row .. first_row + rows - 1 of the task (rows <= MOE_MAX_ROWS). The task was checked, the workspace reserved for its
 * shape, the floating point state set. trace: NULL, or where to leave every intermediate. */
void evaluate(const KernelOps& ops, Workspace& workspace, const MoeTask& task, uint32_t first_row, uint32_t rows, const MoeTrace* trace);

/* 0, or -1 and a message that names the field. */
int check_task(const MoeTask& task);

}  // namespace glm53

#endif /* GLM53_CPU_EXPERT_H_ */
