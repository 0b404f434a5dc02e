#include "cpu/expert.h"

#include <stdlib.h>
#include <string.h>

#include <new>

#include "cpu/error.h"

namespace glm53 {

namespace {

constexpr uint32_t kChunkBlocks = 8; /* blocks of a row that are prepared together: about 2 us */

/* Hands out parts of a piece of memory; with NULL it only counts. */
class Cutter {
 public:
  explicit Cutter(char* memory) : memory_(memory) {}
  template <typename T>
  T* take(size_t count) {
    char* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += aligned_size(count * sizeof(T));
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

void sum_groups(const float* groups, uint32_t rows, float* z) {
  const size_t size = size_t{rows} * kBlock;
  for (size_t i = 0; i < size; ++i) z[i] = (groups[i] + groups[size + i]) + (groups[2 * size + i] + groups[3 * size + i]);
}

}  // namespace

Memory::~Memory() { free(memory_); }

char* Memory::reserve(size_t bytes) {
  if (bytes <= bytes_) return memory_;
  char* memory = static_cast<char*>(aligned_alloc(kCacheLine, aligned_size(bytes)));
  if (memory == nullptr) return nullptr;
  free(memory_);
  memory_ = memory;
  bytes_ = bytes;
  return memory_;
}

namespace {

struct Places {
  int16_t* q[3];
  float* scale[3];
  int32_t* sum[3];
  float* groups[3];
  std::atomic<uint32_t>*counters, *inner_parts, *outer_parts;
  size_t used;
};

Places cut(const MoeExpertShape& shape, uint32_t rows, Splits splits, char* memory) {
  Cutter cutter(memory);
  Places places = {};
  const uint32_t widths[3] = {is_gateless(shape) ? 0 : shape.hidden, shape.hidden, shape.inter};
  const uint32_t outputs[3] = {is_gateless(shape) ? 0 : shape.inter, shape.inter, shape.hidden};
  for (int i = 0; i < 3; ++i) {
    places.q[i] = cutter.take<int16_t>(size_t{rows} * widths[i]);
    places.scale[i] = cutter.take<float>(size_t{rows} * (widths[i] / kBlock));
    places.sum[i] = cutter.take<int32_t>(size_t{rows} * (widths[i] / kBlock));
    const bool split = (i == 2 ? splits.outer : splits.inner) > 1;
    if (split) places.groups[i] = cutter.take<float>(size_t{outputs[i]} * kGroups * rows);
  }
  places.counters = cutter.take<std::atomic<uint32_t>>(1 + kGroups);
  places.inner_parts = cutter.take<std::atomic<uint32_t>>(shape.inter / kBlock);
  places.outer_parts = cutter.take<std::atomic<uint32_t>>(shape.hidden / kBlock);
  places.used = cutter.used();
  return places;
}

void reset(std::atomic<uint32_t>* counters, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) new (counters + i) std::atomic<uint32_t>(0);
}

}  // namespace

size_t Evaluation::bytes(const MoeExpertShape& shape, uint32_t rows, Splits splits) { return cut(shape, rows, splits, nullptr).used; }

void Evaluation::place(const KernelOps& ops, const MoeTask& task, uint32_t first_row, uint32_t rows, Splits splits, char* memory,
                       const MoeTrace* trace) {
  ops_ = &ops;
  task_ = &task;
  shape_ = task.shape;
  record_ = static_cast<const char*>(task.record);
  trace_ = trace;
  first_row_ = first_row;
  rows_ = rows;
  chunks_per_row_ = (shape_->hidden / kBlock + kChunkBlocks - 1) / kChunkBlocks;
  gated_ = !is_gateless(*shape_);
  splits_ = splits;
  gate_ = gate_parts(*shape_);
  up_ = up_parts(*shape_);
  down_ = down_parts(*shape_);
  const Places at = cut(*shape_, rows, splits, memory);
  gate_in_ = {at.q[0], at.scale[0], at.sum[0]};
  up_in_ = {at.q[1], at.scale[1], at.sum[1]};
  down_in_ = {at.q[2], at.scale[2], at.sum[2]};
  gate_groups_ = at.groups[0];
  up_groups_ = at.groups[1];
  down_groups_ = at.groups[2];
  chunks_done_ = at.counters;
  group_bands_done_ = at.counters + 1;
  inner_parts_done_ = at.inner_parts;
  outer_parts_done_ = at.outer_parts;
  reset(at.counters, 1 + kGroups);
  reset(inner_parts_done_, inner_bands());
  reset(outer_parts_done_, outer_bands());
}

void Evaluation::prepare(uint32_t chunk) {
  const uint32_t m = chunk / chunks_per_row_;
  const uint32_t first = chunk % chunks_per_row_ * kChunkBlocks;
  const uint32_t blocks = shape_->hidden / kBlock;
  const uint32_t end = first + kChunkBlocks < blocks ? first + kChunkBlocks : blocks;
  const size_t value_bytes = task_->x_dtype == MOE_DTYPE_F16 ? 2 : 4;
  const char* row = static_cast<const char*>(task_->x) + static_cast<size_t>(task_->x_rows[first_row_ + m]) * shape_->hidden * value_bytes;
  for (uint32_t b = first; b < end; ++b) {
    const void* x = row + b * kBlock * value_bytes;
    if (gated_) prepare_block(gate_, gate_in_, m, b, x, task_->x_dtype, trace_ ? &trace_->gate : nullptr);
    prepare_block(up_, up_in_, m, b, x, task_->x_dtype, trace_ ? &trace_->up : nullptr);
  }
  chunks_done_->fetch_add(1, std::memory_order_acq_rel);
}

void Evaluation::inner(uint32_t band, uint32_t part, ThreadScratch& scratch) {
  if (splits_.inner == 1) {
    if (gated_) {
      multiply(gate_, gate_in_, band, 0, 1, scratch.groups, scratch);
      finish(gate_, band, scratch.groups, scratch.g, trace_ ? &trace_->gate : nullptr);
    }
    multiply(up_, up_in_, band, 0, 1, scratch.groups, scratch);
    finish(up_, band, scratch.groups, scratch.u, trace_ ? &trace_->up : nullptr);
  } else {
    float* gate_groups = gate_groups_ + band * group_floats();
    float* up_groups = up_groups_ + band * group_floats();
    if (gated_) multiply(gate_, gate_in_, band, part, splits_.inner, gate_groups, scratch);
    multiply(up_, up_in_, band, part, splits_.inner, up_groups, scratch);
    if (inner_parts_done_[band].fetch_add(1, std::memory_order_acq_rel) + 1 != splits_.inner) return;
    if (gated_) finish(gate_, band, gate_groups, scratch.g, nullptr);
    finish(up_, band, up_groups, scratch.u, nullptr);
  }
  activate(band, scratch);
  group_bands_done_[band / group_blocks(inner_bands())].fetch_add(1, std::memory_order_acq_rel);
}

bool Evaluation::outer_ready(uint32_t part) const {
  const uint32_t length = group_blocks(inner_bands());
  const uint32_t step = kGroups / splits_.outer;
  for (uint32_t g = part * step; g < (part + 1) * step; ++g) {
    const uint32_t first = g * length < inner_bands() ? g * length : inner_bands();
    const uint32_t end = first + length < inner_bands() ? first + length : inner_bands();
    if (group_bands_done_[g].load(std::memory_order_acquire) != end - first) return false;
  }
  return true;
}

void Evaluation::outer(uint32_t band, uint32_t part, ThreadScratch& scratch) {
  float* groups = splits_.outer == 1 ? scratch.groups : down_groups_ + band * group_floats();
  multiply(down_, down_in_, band, part, splits_.outer, groups, scratch);
  if (splits_.outer > 1 && outer_parts_done_[band].fetch_add(1, std::memory_order_acq_rel) + 1 != splits_.outer) return;
  finish(down_, band, groups, scratch.u, trace_ ? &trace_->down : nullptr);
  write_out(band, scratch.u);
}

void Evaluation::prepare_block(const LinearParts& linear, const Quantised& to, uint32_t m, uint32_t b, const void* x, uint32_t x_dtype,
                               const MoeLinearTrace* trace) {
  const size_t block = static_cast<size_t>(m) * (linear.in_features / kBlock) + b;
  const size_t at = block * kBlock;
  const uint16_t* suh = part_of(linear.suh) + b * kBlock;
  if (trace == nullptr) {
    ops_->prepare_block(x, x_dtype, suh, to.q + at, to.scale + block, to.sum + block, nullptr);
    return;
  }
  const BlockTrace steps = {trace->v + at, trace->h + at};
  ops_->prepare_block(x, x_dtype, suh, to.q + at, to.scale + block, to.sum + block, &steps);
  memcpy(trace->q + at, to.q + at, kBlock * sizeof(int16_t));
  trace->scale[block] = to.scale[block];
}

void Evaluation::multiply(const LinearParts& linear, const Quantised& from, uint32_t band, uint32_t part, uint32_t parts, float* groups,
                          ThreadScratch& scratch) {
  const uint32_t step = kGroups / parts;
  const BandArgs args = {part_of(linear.trellis),
                         linear.in_features / kBlock,
                         linear.out_features / 16u,
                         linear.k,
                         shape_->codebook,
                         shape_->layout,
                         band,
                         part * step,
                         (part + 1) * step,
                         rows_,
                         from.q,
                         from.scale,
                         from.sum,
                         groups,
                         scratch.band};
  ops_->band(args);
}

void Evaluation::finish(const LinearParts& linear, uint32_t band, const float* groups, float* out, const MoeLinearTrace* trace) {
  const uint16_t* svh = part_of(linear.svh) + band * kBlock;
  const uint16_t* bias = linear.bias == MOE_ABSENT ? nullptr : part_of(linear.bias) + band * kBlock;
  sum_groups(groups, rows_, out);
  for (uint32_t m = 0; m < rows_; ++m) {
    float* values = out + m * kBlock;
    const size_t at = static_cast<size_t>(m) * linear.out_features + band * kBlock;
    if (trace != nullptr) memcpy(trace->z + at, values, kBlock * sizeof(float));
    ops_->finish_block(values, svh, bias, values);
    if (trace != nullptr) memcpy(trace->out + at, values, kBlock * sizeof(float));
  }
}

void Evaluation::activate(uint32_t band, ThreadScratch& scratch) {
  for (uint32_t m = 0; m < rows_; ++m) {
    ops_->activate_block(shape_->activation, shape_->act_limit, gated_ ? scratch.g + m * kBlock : nullptr, scratch.u + m * kBlock,
                         scratch.a);
    if (trace_ != nullptr) memcpy(trace_->a + static_cast<size_t>(m) * shape_->inter + band * kBlock, scratch.a, kBlock * sizeof(float));
    prepare_block(down_, down_in_, m, band, scratch.a, MOE_DTYPE_F32, trace_ ? &trace_->down : nullptr);
  }
}

void Evaluation::write_out(uint32_t band, const float* values) {
  for (uint32_t m = 0; m < rows_; ++m) {
    float* row = task_->out + static_cast<size_t>(task_->out_rows[first_row_ + m]) * shape_->hidden;
    memcpy(row + band * kBlock, values + m * kBlock, kBlock * sizeof(float));
  }
}

bool evaluate(const KernelOps& ops, Memory& memory, ThreadScratch& scratch, const MoeTask& task, uint32_t first_row, uint32_t rows,
              const MoeTrace* trace) {
  char* at = memory.reserve(Evaluation::bytes(*task.shape, rows, {}));
  if (at == nullptr) return false;
  Evaluation evaluation;
  evaluation.place(ops, task, first_row, rows, {}, at, trace);
  for (uint32_t i = 0; i < evaluation.num_chunks(); ++i) evaluation.prepare(i);
  for (uint32_t i = 0; i < evaluation.inner_bands(); ++i) evaluation.inner(i, 0, scratch);
  for (uint32_t i = 0; i < evaluation.outer_bands(); ++i) evaluation.outer(i, 0, scratch);
  return true;
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
