/* Random experts on pools of several threads, compared with the scalar kernel in one thread, for sanitizers: `make sanitize`. The argument
 * is the number of rounds. Exit code 0: every bit was equal. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "moe_expert.h"
#include "moe_host.h"
#include "moe_trace.h"

namespace {

using Random = std::mt19937_64;

struct FreeMemory {
  void operator()(uint8_t* memory) const { free(memory); }
};
using Record = std::unique_ptr<uint8_t, FreeMemory>;

Record new_record(const MoeExpertShape& shape) { return Record(static_cast<uint8_t*>(aligned_alloc(4096, shape.record_bytes))); }

struct Expert {
  MoeExpertShape shape;
  Record record; /* exactly record_bytes, so that a read behind it is noticed */
};

MoeExpertShape random_shape(Random& random) {
  MoeExpertShape shape;
  const auto below = [&random](uint32_t count) { return static_cast<uint32_t>(random() % count); };
  const uint32_t codebook = below(2) == 0 ? static_cast<uint32_t>(MOE_CODEBOOK_MUL1) : below(3);
  const int code = moe_shape_init(&shape, 128 * (1 + below(4)), 128 * (1 + below(4)), 1 + below(8), 1 + below(8), 1 + below(8), codebook,
                                  MOE_ACT_SILU, below(2) == 0 ? 0.0f : 10.0f, below(4) == 0, below(2));
  if (code != 0) {
    fprintf(stderr, "%s\n", moe_last_error());
    exit(2);
  }
  return shape;
}

Expert random_expert(Random& random) {
  Expert expert = {random_shape(random), nullptr};
  expert.record = new_record(expert.shape);
  for (uint32_t i = 0; i < expert.shape.record_bytes; i += 2) {
    uint16_t half = static_cast<uint16_t>(random());
    if (i >= expert.shape.up_trellis && i >= expert.shape.down_trellis) half = static_cast<uint16_t>((half & 0x83FFu) | 0x2C00u);
    memcpy(expert.record.get() + i, &half, sizeof half);
  }
  return expert;
}

Expert planar_twin(const Expert& expert) {
  Expert twin = {{}, new_record(expert.shape)};
  if (moe_shape_planar(&twin.shape, &expert.shape) != 0 || moe_repack_planar(&expert.shape, expert.record.get(), twin.record.get()) != 0) {
    fprintf(stderr, "%s\n", moe_last_error());
    exit(2);
  }
  return twin;
}

std::vector<float> outputs(MoePool* pool, const std::vector<Expert>& experts, const std::vector<float>& x, uint32_t rows) {
  std::vector<uint32_t> numbers(rows);
  for (uint32_t i = 0; i < rows; ++i) numbers[i] = i;
  std::vector<std::vector<float>> outs;
  std::vector<MoeTask> tasks;
  for (const Expert& expert : experts) outs.emplace_back(size_t{rows} * expert.shape.hidden);
  for (size_t i = 0; i < experts.size(); ++i) {
    tasks.push_back(
        {&experts[i].shape, experts[i].record.get(), x.data(), numbers.data(), outs[i].data(), numbers.data(), rows, MOE_DTYPE_F32});
  }
  if (moe_pool_run(pool, tasks.data(), static_cast<uint32_t>(tasks.size())) != 0) {
    fprintf(stderr, "%s\n", moe_last_error());
    exit(2);
  }
  std::vector<float> all;
  for (const std::vector<float>& out : outs) all.insert(all.end(), out.begin(), out.end());
  return all;
}

/* True when every variant, split and layout gives the scalar kernel's bits. */
bool round_is_equal(Random& random, MoePool* scalar, const std::vector<MoePool*>& pools) {
  std::vector<Expert> experts;
  for (uint32_t i = 0, count = 1 + random() % 3; i < count; ++i) {
    experts.push_back(random_expert(random));
    if (experts.back().shape.codebook == MOE_CODEBOOK_MUL1) experts.push_back(planar_twin(experts.back()));
  }
  const uint32_t rows = 1 + random() % 10;
  std::vector<float> x(size_t{rows} * 512);
  for (float& value : x) value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-30f;
  const std::vector<float> expected = outputs(scalar, experts, x, rows);
  for (MoePool* pool : pools) {
    /* Asleep at once, falling asleep, and awake when the next call comes. */
    moe_pool_force_hot(pool, std::vector<int64_t>{0, 20'000, 4'000'000}[random() % 3]);
    for (const uint32_t splits : {0u, 1u, 2u, 4u}) {
      moe_pool_force(pool, splits, 0.0);
      const std::vector<float> found = outputs(pool, experts, x, rows);
      if (memcmp(found.data(), expected.data(), expected.size() * sizeof(float)) != 0) return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 20;
  int32_t cpus[64];
  const int num_cpus = moe_physical_cpus(cpus, 64);
  MoePool* scalar = moe_pool_create(MOE_VARIANT_SCALAR, 1, nullptr, 0);
  std::vector<MoePool*> pools;
  for (uint32_t variant = MOE_VARIANT_AVX2; variant <= MOE_VARIANT_AVXVNNI; ++variant) {
    if (!moe_variant_available(variant)) continue;
    pools.push_back(moe_pool_create(variant, 4, nullptr, 0));
    pools.push_back(moe_pool_create(variant, 3, cpus, num_cpus > 64 ? 64 : static_cast<uint32_t>(num_cpus)));
  }
  Random random(53);
  int equal = 0;
  for (int i = 0; i < rounds; ++i) {
    equal += round_is_equal(random, scalar, pools);
    if (i % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2)); /* let the threads fall asleep */
  }
  for (MoePool* pool : pools) moe_pool_destroy(pool);
  moe_pool_destroy(scalar);
  printf("%d of %d rounds on %zu pools had the scalar kernel's bits\n", equal, rounds, pools.size());
  return equal == rounds ? 0 : 1;
}
