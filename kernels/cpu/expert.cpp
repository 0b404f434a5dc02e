#include "cpu/expert.h"

#include <stdlib.h>
#include <string.h>

#include "cpu/error.h"
#include "cpu/numerics.h"
#include "cpu/shape.h"

namespace glm53 {

namespace {
constexpr size_t kAlign = 64;
size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
}  // namespace

Workspace::~Workspace() { free(memory_); }

bool Workspace::reserve(const MoeExpertShape& shape) {
  if (shape.hidden <= hidden_ && shape.inter <= inter_) return true;
  const uint32_t hidden = shape.hidden > hidden_ ? shape.hidden : hidden_;
  const uint32_t inter = shape.inter > inter_ ? shape.inter : inter_;
  const size_t inputs = 2 * size_t{hidden} + inter; /* gate, up, down */
  const size_t bytes = aligned(MOE_MAX_ROWS * inputs * sizeof(int16_t)) + 2 * aligned(MOE_MAX_ROWS * (inputs / kBlock) * sizeof(float)) +
                       (2 * MOE_MAX_ROWS + 1) * kBlock * sizeof(float) + kBandScratchBytes + 8 * kAlign;
  if (bytes > bytes_) {
    char* memory = static_cast<char*>(aligned_alloc(kAlign, aligned(bytes)));
    if (memory == nullptr) return false;
    free(memory_);
    memory_ = memory;
    bytes_ = bytes;
  }
  place(hidden, inter);
  return true;
}

void Workspace::place(uint32_t hidden, uint32_t inter) {
  hidden_ = hidden;
  inter_ = inter;
  char* next = memory_;
  const auto take = [&next](size_t bytes) {
    char* at = next;
    next += aligned(bytes);
    return at;
  };
  band_scratch_ = take(kBandScratchBytes);
  g_ = reinterpret_cast<float*>(take(MOE_MAX_ROWS * kBlock * sizeof(float)));
  u_ = reinterpret_cast<float*>(take(MOE_MAX_ROWS * kBlock * sizeof(float)));
  a_ = reinterpret_cast<float*>(take(kBlock * sizeof(float)));
  const size_t inputs = 2 * size_t{hidden} + inter;
  int16_t* q = reinterpret_cast<int16_t*>(take(MOE_MAX_ROWS * inputs * sizeof(int16_t)));
  float* scale = reinterpret_cast<float*>(take(MOE_MAX_ROWS * (inputs / kBlock) * sizeof(float)));
  int32_t* sum = reinterpret_cast<int32_t*>(take(MOE_MAX_ROWS * (inputs / kBlock) * sizeof(int32_t)));
  const size_t hidden_values = MOE_MAX_ROWS * size_t{hidden};
  gate_ = {q, scale, sum};
  up_ = {q + hidden_values, scale + hidden_values / kBlock, sum + hidden_values / kBlock};
  down_ = {q + 2 * hidden_values, scale + 2 * hidden_values / kBlock, sum + 2 * hidden_values / kBlock};
}

/* The state of one evaluate() call. */
class Evaluation {
 public:
  Evaluation(const KernelOps& ops, Workspace& workspace, const MoeTask& task, uint32_t first_row, uint32_t rows, const MoeTrace* trace)
      : ops_(ops), ws_(workspace), task_(task), shape_(*task.shape), first_row_(first_row), rows_(rows), trace_(trace) {}

  void run() {
    const bool gated = !is_gateless(shape_);
    const LinearParts gate = gate_parts(shape_);
    const LinearParts up = up_parts(shape_);
    const LinearParts down = down_parts(shape_);
    prepare_inputs(gated ? &gate : nullptr, up);
    for (uint32_t band = 0; band < shape_.inter / kBlock; ++band) {
      if (gated) linear_band(gate, ws_.gate_, band, ws_.g_, trace_ ? &trace_->gate : nullptr);
      linear_band(up, ws_.up_, band, ws_.u_, trace_ ? &trace_->up : nullptr);
      for (uint32_t m = 0; m < rows_; ++m) activate_and_prepare(down, band, m, gated);
    }
    for (uint32_t band = 0; band < shape_.hidden / kBlock; ++band) {
      linear_band(down, ws_.down_, band, ws_.u_, trace_ ? &trace_->down : nullptr);
      for (uint32_t m = 0; m < rows_; ++m) {
        float* row = task_.out + static_cast<size_t>(task_.out_rows[first_row_ + m]) * shape_.hidden;
        memcpy(row + band * kBlock, ws_.u_ + m * kBlock, kBlock * sizeof(float));
      }
    }
  }

 private:
  const uint16_t* part(uint32_t offset) const { return reinterpret_cast<const uint16_t*>(static_cast<const char*>(task_.record) + offset); }

  void prepare_inputs(const LinearParts* gate, const LinearParts& up) {
    const size_t value_bytes = task_.x_dtype == MOE_DTYPE_F16 ? 2 : 4;
    for (uint32_t m = 0; m < rows_; ++m) {
      const char* row = static_cast<const char*>(task_.x) + static_cast<size_t>(task_.x_rows[first_row_ + m]) * shape_.hidden * value_bytes;
      for (uint32_t b = 0; b < shape_.hidden / kBlock; ++b) {
        const void* x = row + b * kBlock * value_bytes;
        if (gate != nullptr) prepare(*gate, ws_.gate_, m, b, x, task_.x_dtype, trace_ ? &trace_->gate : nullptr);
        prepare(up, ws_.up_, m, b, x, task_.x_dtype, trace_ ? &trace_->up : nullptr);
      }
    }
  }

  void prepare(const LinearParts& linear, const Workspace::Quantised& to, uint32_t m, uint32_t b, const void* x, uint32_t x_dtype,
               const MoeLinearTrace* trace) {
    const size_t block = static_cast<size_t>(m) * (linear.in_features / kBlock) + b;
    const size_t at = block * kBlock;
    const uint16_t* suh = part(linear.suh) + b * kBlock;
    if (trace == nullptr) {
      ops_.prepare_block(x, x_dtype, suh, to.q + at, to.scale + block, to.sum + block, nullptr);
      return;
    }
    const BlockTrace steps = {trace->v + at, trace->h + at};
    ops_.prepare_block(x, x_dtype, suh, to.q + at, to.scale + block, to.sum + block, &steps);
    memcpy(trace->q + at, to.q + at, kBlock * sizeof(int16_t));
    trace->scale[block] = to.scale[block];
  }

  /* Steps 4-6 of one band for all rows, into out [rows][128]. */
  void linear_band(const LinearParts& linear, const Workspace::Quantised& from, uint32_t band, float* out, const MoeLinearTrace* trace) {
    const BandArgs args = {part(linear.trellis),
                           linear.in_features / kBlock,
                           linear.out_features / 16u,
                           linear.k,
                           shape_.codebook,
                           band,
                           rows_,
                           from.q,
                           from.scale,
                           from.sum,
                           out,
                           ws_.band_scratch_};
    ops_.band(args);
    const uint16_t* svh = part(linear.svh) + band * kBlock;
    const uint16_t* bias = linear.bias == MOE_ABSENT ? nullptr : part(linear.bias) + band * kBlock;
    for (uint32_t m = 0; m < rows_; ++m) {
      float* values = out + m * kBlock;
      const size_t at = static_cast<size_t>(m) * linear.out_features + band * kBlock;
      if (trace != nullptr) memcpy(trace->z + at, values, kBlock * sizeof(float));
      ops_.finish_block(values, svh, bias, values);
      if (trace != nullptr) memcpy(trace->out + at, values, kBlock * sizeof(float));
    }
  }

  void activate_and_prepare(const LinearParts& down, uint32_t band, uint32_t m, bool gated) {
    ops_.activate_block(shape_.activation, shape_.act_limit, gated ? ws_.g_ + m * kBlock : nullptr, ws_.u_ + m * kBlock, ws_.a_);
    if (trace_ != nullptr) memcpy(trace_->a + static_cast<size_t>(m) * shape_.inter + band * kBlock, ws_.a_, kBlock * sizeof(float));
    prepare(down, ws_.down_, m, band, ws_.a_, MOE_DTYPE_F32, trace_ ? &trace_->down : nullptr);
  }

  const KernelOps& ops_;
  Workspace& ws_;
  const MoeTask& task_;
  const MoeExpertShape& shape_;
  const uint32_t first_row_;
  const uint32_t rows_;
  const MoeTrace* const trace_;
};

void evaluate(const KernelOps& ops, Workspace& workspace, const MoeTask& task, uint32_t first_row, uint32_t rows, const MoeTrace* trace) {
  Evaluation(ops, workspace, task, first_row, rows, trace).run();
}

int check_task(const MoeTask& task) {
  if (task.num_rows == 0) return 0;
  if (task.shape == nullptr) return fail("task.shape must not be NULL");
  if (task.record == nullptr) return fail("task.record must not be NULL");
  if (reinterpret_cast<uintptr_t>(task.record) % 64u != 0) return fail("task.record is not 64-byte aligned");
  if (task.x == nullptr || task.x_rows == nullptr) return fail("task.x and task.x_rows must not be NULL");
  if (task.out == nullptr || task.out_rows == nullptr) return fail("task.out and task.out_rows must not be NULL");
  if (task.x_dtype > MOE_DTYPE_F16) return fail("task.x_dtype %u is not known (0 = fp32, 1 = fp16)", task.x_dtype);
  return check_shape(*task.shape);
}

}  // namespace glm53
