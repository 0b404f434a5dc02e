/* Evaluates one made-up MUL1 expert of 1024 x 512 at 3 bits a number of times, for instruction counters (bench/kernel_instructions.py):
 * expert_once VARIANT LAYOUT ROWS TIMES. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <random>
#include <vector>

#include "moe_expert.h"

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const uint32_t variant = static_cast<uint32_t>(atoi(argv[1])), rows = static_cast<uint32_t>(atoi(argv[3]));
  MoeExpertShape shape;
  if (moe_shape_init(&shape, 1024, 512, 3, 3, 3, MOE_CODEBOOK_MUL1, MOE_ACT_SILU, 10.0f, 0, 0) != 0) return 2;
  shape.layout = static_cast<uint8_t>(atoi(argv[2]));
  uint16_t* record = static_cast<uint16_t*>(aligned_alloc(4096, shape.record_bytes));
  if (record == nullptr) return 2;
  std::mt19937 random(53);
  for (uint32_t i = 0; i < shape.record_bytes / 2; ++i) {
    const uint16_t bits = static_cast<uint16_t>(random());
    record[i] = 2 * i < shape.gate_suh ? bits : static_cast<uint16_t>((bits & 0x83FFu) | 0x2C00u);
  }
  std::vector<float> x(size_t{rows} * 1024), out(size_t{rows} * 1024);
  for (float& value : x) value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-30f;
  std::vector<uint32_t> numbers(rows);
  for (uint32_t i = 0; i < rows; ++i) numbers[i] = i;
  const MoeTask task = {&shape, record, x.data(), numbers.data(), out.data(), numbers.data(), rows, MOE_DTYPE_F32};
  MoePool* pool = moe_pool_create(variant, 1, nullptr, 0);
  if (pool == nullptr) {
    fprintf(stderr, "%s\n", moe_last_error());
    return 1;
  }
  int code = 0;
  for (int i = 0; i < atoi(argv[4]); ++i) code |= moe_pool_run(pool, &task, 1);
  moe_pool_destroy(pool);
  free(record);
  return code == 0 ? 0 : 1;
}
