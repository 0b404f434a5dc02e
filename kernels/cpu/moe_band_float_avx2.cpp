/* Steps 4 and 5 for MCG and 3INST in AVX2: their weights are not affine in an integer, so a block is summed in fp32 over ascending inputs,
 * eight columns in a vector. */
#include <immintrin.h>
#include <string.h>

#include "cpu/avx2_band.h"
#include "cpu/avx2_tiles.h"
#include "cpu/numerics.h"
#include "cpu/trellis.h"
#include "moe_expert.h"

namespace {

using namespace glm53;

constexpr int kTiles = static_cast<int>(kBlockTiles);

struct Scratch {
  float weights[kBlock][16];
  float z[4][kTiles][MOE_MAX_ROWS][16];
};
static_assert(sizeof(Scratch) <= kBandScratchBytes, "the scratch of a band is too small");

/* fp16 weights of eight states (one a dword), widened. */
inline __m256 weights_of(__m256i states, uint32_t multiplier, uint32_t increment) {
  __m256i x = _mm256_mullo_epi32(states, _mm256_set1_epi32(static_cast<int32_t>(multiplier)));
  x = _mm256_add_epi32(x, _mm256_set1_epi32(static_cast<int32_t>(increment)));
  x = _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int32_t>(kInstMask)));
  x = _mm256_xor_si256(x, _mm256_set1_epi32(static_cast<int32_t>(kInstFlip)));
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));
  const __m256i high = _mm256_srli_epi32(x, 16);
  /* [low 0-3, high 0-3 | low 4-7, high 4-7] -> low 0-7 | high 0-7 */
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
  const __m256 sum = _mm256_add_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
  return _mm256_cvtph_ps(_mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* From vectors by column pair (dword q: rows 2q, 2q+1) to rows of eight columns. */
inline void store_rows(const __m256i* columns, uint32_t multiplier, uint32_t increment, float (*rows)[16]) {
  const __m256i t0 = _mm256_unpacklo_epi32(columns[0], columns[1]);
  const __m256i t1 = _mm256_unpacklo_epi32(columns[2], columns[3]);
  const __m256i t2 = _mm256_unpackhi_epi32(columns[0], columns[1]);
  const __m256i t3 = _mm256_unpackhi_epi32(columns[2], columns[3]);
  const __m256i by_q[4] = {_mm256_unpacklo_epi64(t0, t1), _mm256_unpackhi_epi64(t0, t1), _mm256_unpacklo_epi64(t2, t3),
                           _mm256_unpackhi_epi64(t2, t3)};
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int q = 0; q < 4; ++q) {
    const __m256i states = _mm256_permutevar8x32_epi32(by_q[q], order);
    _mm256_store_ps(rows[2 * q], weights_of(_mm256_and_si256(states, _mm256_set1_epi32(0xFFFF)), multiplier, increment));
    _mm256_store_ps(rows[2 * q + 1], weights_of(_mm256_srli_epi32(states, 16), multiplier, increment));
  }
}

template <int K>
void decode_tile(const uint8_t* tile, uint32_t multiplier, uint32_t increment, float (*rows)[16]) {
  TileReader<K> reader;
  reader.open(tile);
  __m256i pairs[4][kPairs];
#pragma GCC unroll 4
  for (int a = 0; a < 4; ++a) run_states(reader, a, pairs[a]);
  for (int pair = 0; pair < kPairs; ++pair) {
    const __m256i columns[4] = {pairs[0][pair], pairs[1][pair], pairs[2][pair], pairs[3][pair]};
    float (*to)[16] = reinterpret_cast<float (*)[16]>(rows[8 * (pair % 2)] + 8 * (pair / 2));
    store_rows(columns, multiplier, increment, to);
  }
}

template <int Rows>
void multiply_block(const BandArgs& args, uint32_t b, const float (*weights)[16], float (*z)[16]) {
  const size_t q_stride = static_cast<size_t>(args.in_blocks) * kBlock;
  const int16_t* q = args.q + b * kBlock;
  __m256 sums[Rows][2];
  for (int m = 0; m < Rows; ++m) sums[m][0] = sums[m][1] = _mm256_setzero_ps();
  for (uint32_t i = 0; i < kBlock; ++i) {
    const __m256 w0 = _mm256_load_ps(weights[i]);
    const __m256 w1 = _mm256_load_ps(weights[i] + 8);
#pragma GCC unroll 4
    for (int m = 0; m < Rows; ++m) {
      const __m256 x = _mm256_set1_ps(static_cast<float>(q[m * q_stride + i]));
      sums[m][0] = _mm256_fmadd_ps(w0, x, sums[m][0]);
      sums[m][1] = _mm256_fmadd_ps(w1, x, sums[m][1]);
    }
  }
  for (int m = 0; m < Rows; ++m) {
    const __m256 scale = _mm256_set1_ps(args.scale[m * args.in_blocks + b]);
    _mm256_store_ps(z[m], _mm256_fmadd_ps(sums[m][0], scale, _mm256_load_ps(z[m])));
    _mm256_store_ps(z[m] + 8, _mm256_fmadd_ps(sums[m][1], scale, _mm256_load_ps(z[m] + 8)));
  }
}

/* Rows in steps of up to four: that many pairs of sums stay in registers. */
void multiply_rows(const BandArgs& args, uint32_t b, const float (*weights)[16], float (*z)[16]) {
  BandArgs left = args;
  while (left.rows > 0) {
    const uint32_t step = left.rows < 4 ? left.rows : 4;
    if (step == 4) multiply_block<4>(left, b, weights, z);
    if (step == 3) multiply_block<3>(left, b, weights, z);
    if (step == 2) multiply_block<2>(left, b, weights, z);
    if (step == 1) multiply_block<1>(left, b, weights, z);
    left.rows -= step;
    left.q += static_cast<size_t>(step) * left.in_blocks * kBlock;
    left.scale += step * left.in_blocks;
    z += step;
  }
}

template <int K>
void band_float(const BandArgs& args) {
  Scratch& scratch = *static_cast<Scratch*>(args.scratch);
  memset(scratch.z, 0, sizeof scratch.z);
  const bool mcg = args.codebook == MOE_CODEBOOK_MCG;
  const uint32_t multiplier = mcg ? kMcgMultiplier : kInstMultiplier;
  const uint32_t increment = mcg ? 0 : kInstIncrement;
  const size_t stride = static_cast<size_t>(args.out_tiles) * 32 * K;
  const uint8_t* top = reinterpret_cast<const uint8_t*>(args.trellis) + static_cast<size_t>(args.band) * kTiles * 32 * K;
  const uint32_t length = group_blocks(args.in_blocks);
  const uint32_t end = args.end_group * length < args.in_blocks ? args.end_group * length : args.in_blocks;
  for (uint32_t b = args.first_group * length; b < end; ++b) {
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint8_t* at = top + b * kTiles * stride + tile * 32 * K;
      for (int kt = 0; kt < kTiles; ++kt) decode_tile<K>(at + kt * stride, multiplier, increment, scratch.weights + 16 * kt);
      multiply_rows(args, b, scratch.weights, scratch.z[b / length][tile]);
    }
  }
  for (uint32_t g = args.first_group; g < args.end_group; ++g) {
    for (uint32_t m = 0; m < args.rows; ++m) {
      float* z = args.groups + (static_cast<size_t>(g) * args.rows + m) * kBlock;
      for (int tile = 0; tile < kTiles; ++tile) memcpy(z + tile * 16, scratch.z[g][tile][m], 16 * sizeof(float));
    }
  }
}

}  // namespace

void glm53::band_float_avx2(const BandArgs& args) {
  switch (args.k) {
    case 1:
      return band_float<1>(args);
    case 2:
      return band_float<2>(args);
    case 3:
      return band_float<3>(args);
    case 4:
      return band_float<4>(args);
    case 5:
      return band_float<5>(args);
    case 6:
      return band_float<6>(args);
    case 7:
      return band_float<7>(args);
    default:
      return band_float<8>(args);
  }
}
