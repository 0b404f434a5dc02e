#include "cpu/self_test.h"

#include <string.h>

#include <chrono>
#include <initializer_list>
#include <memory>
#include <vector>

#include "cpu/expert.h"
#include "cpu/numerics.h"

namespace glm53 {

namespace {

constexpr uint32_t kHidden = 256;
constexpr uint32_t kInter = 128;
constexpr uint32_t kMaxRecordBytes = 128 * 1024; /* 3 matrices of 256 x 128 at 8 bits fit */

/* splitmix64: a fixed stream of bits. */
class Random {
 public:
  uint32_t next() {
    state_ += 0x9E3779B97F4A7C15ull;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
  }

 private:
  uint64_t state_ = 53;
};

struct Sample {
  MoeExpertShape shape;
  alignas(64) uint8_t record[kMaxRecordBytes];
  float x[MOE_MAX_ROWS * kHidden];
  float out[2][MOE_MAX_ROWS * kHidden];
};

void fill_scales(Sample& sample, Random& random, uint32_t offset, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint16_t half = static_cast<uint16_t>((random.next() & 0x83FFu) | 0x3000u); /* +-0.125 .. 0.25 */
    memcpy(sample.record + offset + 2 * i, &half, sizeof half);
  }
}

bool make_sample(Sample& sample, uint32_t k, uint32_t codebook) {
  MoeExpertShape& s = sample.shape;
  if (moe_shape_init(&s, kHidden, kInter, k, k, k, codebook, MOE_ACT_SILU, 10.0f, 0, 0) != 0 || s.record_bytes > kMaxRecordBytes)
    return false;
  Random random;
  for (uint32_t i = 0; i < s.gate_suh; ++i) sample.record[i] = static_cast<uint8_t>(random.next());
  fill_scales(sample, random, s.gate_suh, kHidden);
  fill_scales(sample, random, s.gate_svh, kInter);
  fill_scales(sample, random, s.up_suh, kHidden);
  fill_scales(sample, random, s.up_svh, kInter);
  fill_scales(sample, random, s.down_suh, kInter);
  fill_scales(sample, random, s.down_svh, kHidden);
  for (float& x : sample.x) x = static_cast<float>(static_cast<int32_t>(random.next())) * 0x1p-29f;
  return true;
}

constexpr uint32_t kRows[MOE_MAX_ROWS] = {0, 1, 2, 3, 4, 5, 6, 7};

struct Room {
  Memory memory;
  ThreadScratch scratch;
};

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

double run_us(const KernelOps& ops, Room& room, Sample& sample, uint32_t which, uint32_t rows) {
  const MoeTask task = {&sample.shape, sample.record, sample.x, kRows, sample.out[which], kRows, rows, MOE_DTYPE_F32};
  const auto start = std::chrono::steady_clock::now();
  if (!evaluate(ops, room.memory, room.scratch, task, 0, rows, nullptr)) return 1e30;
  return since(start);
}

bool same_output(const Sample& sample, uint32_t rows) { return memcmp(sample.out[0], sample.out[1], rows * kHidden * sizeof(float)) == 0; }

}  // namespace

SelfTest run_self_test(const KernelOps& candidate) {
  const FloatStateGuard guard;
  SelfTest result = {};
  result.scalar_us = 1e30;
  for (double& us : result.candidate_us) us = 1e30;
  const auto sample = std::make_unique<Sample>();
  const auto room = std::make_unique<Room>();
  for (const uint32_t codebook : {MOE_CODEBOOK_3INST, MOE_CODEBOOK_MCG, MOE_CODEBOOK_MUL1}) {
    for (uint32_t k = 1; k <= 8; ++k) {
      if (!make_sample(*sample, k, codebook)) return result;
      const uint32_t rows = 1 + (k + 6) % MOE_MAX_ROWS; /* every number of rows once */
      run_us(kScalarOps, *room, *sample, 0, rows);
      run_us(candidate, *room, *sample, 1, rows);
      if (!same_output(*sample, rows)) return result;
    }
  }
  if (!make_sample(*sample, 3, MOE_CODEBOOK_MUL1)) return result;
  for (uint32_t rows = 1; rows <= MOE_MAX_ROWS; ++rows) {
    const double scalar_us = run_us(kScalarOps, *room, *sample, 0, rows);
    if (rows == 1) result.scalar_us = scalar_us;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const double us = run_us(candidate, *room, *sample, 1, rows);
      result.candidate_us[rows] = us < result.candidate_us[rows] ? us : result.candidate_us[rows];
    }
    if (!same_output(*sample, rows)) return result;
  }
  result.same_bits = true;
  return result;
}

bool time_shape(const KernelOps& ops, const MoeExpertShape& shape, double* us) {
  const uint32_t blocks = shape.hidden / kBlock;
  const size_t trellis_bytes = size_t{shape.hidden} * kBlock / 8u * shape.k_up;
  std::vector<uint16_t> trellis(trellis_bytes / 2);
  std::vector<int16_t> q(size_t{MOE_MAX_ROWS} * shape.hidden);
  std::vector<float> scale(MOE_MAX_ROWS * blocks, 1.0f);
  std::vector<int32_t> sum(MOE_MAX_ROWS * blocks, 0);
  Random random;
  for (uint16_t& bits : trellis) bits = static_cast<uint16_t>(random.next());
  for (int16_t& value : q) value = static_cast<int16_t>(random.next() % 65279u - 32639);
  const auto room = std::make_unique<Room>();
  for (uint32_t rows = 1; rows <= MOE_MAX_ROWS; ++rows) {
    /* A matrix of one band: its rows of tiles lie next to each other instead of a matrix's width apart. */
    const BandArgs args = {trellis.data(), blocks,   kBlockTiles,  shape.k_up, shape.codebook,       shape.layout,      0, 0, kGroups,
                           rows,           q.data(), scale.data(), sum.data(), room->scratch.groups, room->scratch.band};
    us[rows] = 1e30;
    for (int repeat = 0; repeat < 12; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      ops.band(args);
      const double time = since(start);
      us[rows] = time < us[rows] ? time : us[rows];
    }
  }
  return true;
}

}  // namespace glm53
