/* One expert for up to 8 rows, cut into units that threads may take in any order that respects their counters. */
#ifndef GLM53_CPU_EXPERT_H_
#define GLM53_CPU_EXPERT_H_

#include <stddef.h>

#include <atomic>

#include "cpu/kernel_ops.h"
#include "cpu/numerics.h"
#include "cpu/shape.h"
#include "moe_expert.h"
#include "moe_trace.h"

namespace glm53 {

constexpr size_t kCacheLine = 64;
constexpr size_t aligned_size(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

/* Memory that grows to the largest need seen and is then reused: a call in steady state allocates nothing. */
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  /* NULL when memory is short. Earlier contents are lost when it grows. */
  char* reserve(size_t bytes);

 private:
  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

/* What a thread needs while it works on one unit. */
struct alignas(kCacheLine) ThreadScratch {
  char band[kBandScratchBytes];
  float groups[kGroups * MOE_MAX_ROWS * kBlock];
  float g[MOE_MAX_ROWS * kBlock];
  float u[MOE_MAX_ROWS * kBlock];
  float a[kBlock];
};

/* Into how many parts the groups of a matrix are cut: 1, 2 or 4. */
struct Splits {
  uint32_t inner = 1; /* gate and up */
  uint32_t outer = 1; /* down */
};

/* The state of one expert for some rows of a task. Units:
 *   prepare(chunk)            transforms and quantises a part of the inputs
 *   inner(band, part)         gate and up of 128 columns, a part of the groups; the last part to end also does the activation and quantises
 *                             the block for the down matrix. Needs all chunks.
 *   outer(band, part)         down, the same way, into the output. Needs the inner bands of its groups.
 * Who ends last does not matter for the bits: it adds the groups in the order of step 5. */
class Evaluation {
 public:
  /* Bytes that place() takes for a task of this shape. */
  static size_t bytes(const MoeExpertShape& shape, uint32_t rows, Splits splits);

  /* The task was checked. memory: bytes(), 64-byte aligned. trace: NULL, or where to leave every intermediate (only with Splits{1, 1}). */
  void place(const KernelOps& ops, const MoeTask& task, uint32_t first_row, uint32_t rows, Splits splits, char* memory,
             const MoeTrace* trace);

  uint32_t num_chunks() const { return rows_ * chunks_per_row_; }
  uint32_t inner_bands() const { return shape_->inter / kBlock; }
  uint32_t outer_bands() const { return shape_->hidden / kBlock; }
  Splits splits() const { return splits_; }

  void prepare(uint32_t chunk);
  void inner(uint32_t band, uint32_t part, ThreadScratch& scratch);
  void outer(uint32_t band, uint32_t part, ThreadScratch& scratch);
  bool prepared() const { return chunks_done_->load(std::memory_order_acquire) == num_chunks(); }
  /* True when the inner bands that this part of a down band reads are done. */
  bool outer_ready(uint32_t part) const;

 private:
  struct Quantised {
    int16_t* q;
    float* scale;
    int32_t* sum;
  };
  using Counter = std::atomic<uint32_t>;

  const uint16_t* part_of(uint32_t offset) const { return reinterpret_cast<const uint16_t*>(record_ + offset); }
  void prepare_block(const LinearParts& linear, const Quantised& to, uint32_t m, uint32_t b, const void* x, uint32_t x_dtype,
                     const MoeLinearTrace* trace);
  /* The sums of a part of a band's groups. */
  void multiply(const LinearParts& linear, const Quantised& from, uint32_t band, uint32_t part, uint32_t parts, float* groups,
                ThreadScratch& scratch);
  /* Steps 5 and 6 on groups [kGroups][rows][128] -> out [rows][128]. */
  void finish(const LinearParts& linear, uint32_t band, const float* groups, float* out, const MoeLinearTrace* trace);
  void activate(uint32_t band, ThreadScratch& scratch);
  void write_out(uint32_t band, const float* values);
  size_t group_floats() const { return size_t{kGroups} * rows_ * kBlock; }

  const KernelOps* ops_;
  const MoeTask* task_;
  const MoeExpertShape* shape_;
  const char* record_;
  const MoeTrace* trace_;
  uint32_t first_row_, rows_, chunks_per_row_;
  bool gated_;
  Splits splits_;
  LinearParts gate_, up_, down_;
  Quantised gate_in_, up_in_, down_in_;
  float *gate_groups_, *up_groups_, *down_groups_; /* [band][kGroups][rows][128] when a matrix is split */
  Counter* chunks_done_;
  Counter* group_bands_done_; /* [kGroups] inner bands done, by the group of the down matrix that reads them */
  Counter* inner_parts_done_; /* [inner_bands()] */
  Counter* outer_parts_done_; /* [outer_bands()] */
};

/* Evaluates rows first_row .. first_row + rows - 1 of the task in the calling thread. False when memory is short. */
bool evaluate(const KernelOps& ops, Memory& memory, ThreadScratch& scratch, const MoeTask& task, uint32_t first_row, uint32_t rows,
              const MoeTrace* trace);

/* 0, or -1 and a message that names the field. */
int check_task(const MoeTask& task);

}  // namespace glm53

#endif /* GLM53_CPU_EXPERT_H_ */
