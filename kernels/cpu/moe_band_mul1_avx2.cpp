/* Steps 4 and 5 for MUL1 in AVX2: integer sums of 128 inputs, 16 columns at a time.
 *
 * A vector of states becomes a vector of byte sums B in 16-bit lanes. One vpmaddwd multiplies them with pairs of inputs, so a 32-bit lane
 * gathers 32 inputs of one column over a block; the offset 510 * S leaves at the end of the block. Sums may wrap on the way: their final
 * values fit 32 bits. With one row the byte sums are used in registers; with more they are kept for all rows (4 KiB, in L1), so the weights
 * are decoded once.
 */
#include <immintrin.h>
#include <string.h>

#include "cpu/avx2_band.h"
#include "cpu/avx2_tiles.h"
#include "cpu/numerics.h"
#include "moe_expert.h"

namespace {

using namespace glm53;

/* Column groups: group c < 4 holds columns 2c and 2c+1 of a tile, group 4 + c columns 2c+8 and 2c+9. */
constexpr int kGroups = 8;
constexpr int kTiles = static_cast<int>(kBlockTiles);

/* Byte sums of one block: [tile in the block][column group][inputs 0-7, 8-15]. */
struct BlockWeights {
  __m256i at[kTiles][kGroups][2];
};

struct Scratch {
  BlockWeights weights;
  float z[MOE_MAX_ROWS][4][kTiles][16]; /* [row][group of step 5][tile of the band][column, in the order of store_z] */
};
static_assert(sizeof(Scratch) <= kBandScratchBytes, "the scratch of a band is too small");

/* Replaces states by the sums of the four bytes of state * 0x83DCD12D, in 16-bit lanes. Four vectors go step by step together: each one's
 * chain of multiplications is long, and the processor looks only so far ahead. */
inline void byte_sums(__m256i* states) {
  const __m256i low_factor = _mm256_set1_epi16(static_cast<int16_t>(0xD12D));
  const __m256i high_factor = _mm256_set1_epi16(static_cast<int16_t>(0x83DC));
  const __m256i ones = _mm256_set1_epi8(1);
  __m256i low[kPairs], high[kPairs], carry[kPairs];
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) low[i] = _mm256_mullo_epi16(states[i], low_factor);
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) carry[i] = _mm256_mulhi_epu16(states[i], low_factor);
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) high[i] = _mm256_mullo_epi16(states[i], high_factor);
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) high[i] = _mm256_add_epi16(high[i], carry[i]);
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) low[i] = _mm256_maddubs_epi16(low[i], ones);
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) high[i] = _mm256_maddubs_epi16(high[i], ones);
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) states[i] = _mm256_add_epi16(low[i], high[i]);
}

inline __m256i broadcast_inputs(const int16_t* q) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
}

/* Adds the four dwords of each half: sums of columns 0, 2, 4, 6 | 1, 3, 5, 7 of four column groups. */
inline __m256i column_sums(const __m256i* groups) {
  return _mm256_hadd_epi32(_mm256_hadd_epi32(groups[0], groups[1]), _mm256_hadd_epi32(groups[2], groups[3]));
}

struct RowFactors {
  __m256i offset;  /* 510 * S */
  __m256 constant; /* -238 * S */
  __m256 scale;    /* s * 2^-17 */
};

inline RowFactors row_factors(const BandArgs& args, uint32_t m, uint32_t b) {
  const int32_t sum = args.sum[m * args.in_blocks + b];
  return {_mm256_set1_epi32(static_cast<int32_t>(510u * static_cast<uint32_t>(sum))), _mm256_set1_ps(-238.0f * static_cast<float>(sum)),
          _mm256_set1_ps(args.scale[m * args.in_blocks + b] * kTwoPow17Inv)};
}

/* z gains the block's sums of eight columns (raw: sums of B * q). */
inline void add_to_z(__m256i raw, const RowFactors& row, float* z) {
  const __m256 a = _mm256_cvtepi32_ps(_mm256_sub_epi32(raw, row.offset));
  const __m256 t = _mm256_fmadd_ps(_mm256_set1_ps(887.0f), a, row.constant);
  _mm256_store_ps(z, _mm256_fmadd_ps(t, row.scale, _mm256_load_ps(z)));
}

/* One row: decode and multiply in one go. */
template <int K>
void block_one_row(const uint8_t* tile, size_t stride, const int16_t* q, const RowFactors& row, float* z) {
  __m256i sums[kGroups];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  for (int kt = 0; kt < kTiles; ++kt, tile += stride, q += 16) {
    _mm_prefetch(reinterpret_cast<const char*>(tile + kTiles * stride), _MM_HINT_T0);
    const __m256i x0 = broadcast_inputs(q);
    const __m256i x1 = broadcast_inputs(q + 8);
    TileReader<K> reader;
    reader.open(tile);
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) {
      __m256i pairs[kPairs];
      run_states(reader, a, pairs);
      byte_sums(pairs);
      sums[a] = _mm256_add_epi32(sums[a], _mm256_add_epi32(_mm256_madd_epi16(pairs[0], x0), _mm256_madd_epi16(pairs[1], x1)));
      sums[4 + a] = _mm256_add_epi32(sums[4 + a], _mm256_add_epi32(_mm256_madd_epi16(pairs[2], x0), _mm256_madd_epi16(pairs[3], x1)));
    }
  }
  add_to_z(column_sums(sums), row, z);
  add_to_z(column_sums(sums + 4), row, z + 8);
}

template <int K>
void decode_block(const uint8_t* tile, size_t stride, BlockWeights& weights) {
  for (int kt = 0; kt < kTiles; ++kt, tile += stride) {
    _mm_prefetch(reinterpret_cast<const char*>(tile + kTiles * stride), _MM_HINT_T0);
    TileReader<K> reader;
    reader.open(tile);
#pragma GCC unroll 4
    for (int a = 0; a < 4; ++a) {
      __m256i pairs[kPairs];
      run_states(reader, a, pairs);
      byte_sums(pairs);
      weights.at[kt][a][0] = pairs[0];
      weights.at[kt][a][1] = pairs[1];
      weights.at[kt][4 + a][0] = pairs[2];
      weights.at[kt][4 + a][1] = pairs[3];
    }
  }
}

/* Rows x column groups that are summed at a time: at most 8 accumulators, so that they stay in registers. */
template <int Rows>
constexpr int groups_at_once() {
  return Rows <= 2 ? 4 : Rows <= 4 ? 2 : 1;
}

/* sums[row][group] of one block from decoded weights. */
template <int Rows>
void multiply_block(const BlockWeights& weights, const int16_t* q, size_t q_stride, __m256i (*sums)[kGroups]) {
  constexpr int kAtOnce = groups_at_once<Rows>();
  for (int first = 0; first < kGroups; first += kAtOnce) {
    __m256i acc[Rows][kAtOnce];
    for (int m = 0; m < Rows; ++m) {
      for (int c = 0; c < kAtOnce; ++c) acc[m][c] = _mm256_setzero_si256();
    }
    for (int kt = 0; kt < kTiles; ++kt) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
        for (int m = 0; m < Rows; ++m) {
          const __m256i x = broadcast_inputs(q + m * q_stride + kt * 16 + half * 8);
#pragma GCC unroll 4
          for (int c = 0; c < kAtOnce; ++c) acc[m][c] = _mm256_add_epi32(acc[m][c], _mm256_madd_epi16(weights.at[kt][first + c][half], x));
        }
      }
    }
    for (int m = 0; m < Rows; ++m) {
      for (int c = 0; c < kAtOnce; ++c) sums[m][first + c] = acc[m][c];
    }
  }
}

void multiply_rows(uint32_t rows, const BlockWeights& weights, const int16_t* q, size_t q_stride, __m256i (*sums)[kGroups]) {
  switch (rows) {
    case 2:
      return multiply_block<2>(weights, q, q_stride, sums);
    case 3:
      return multiply_block<3>(weights, q, q_stride, sums);
    case 4:
      return multiply_block<4>(weights, q, q_stride, sums);
    case 5:
      return multiply_block<5>(weights, q, q_stride, sums);
    case 6:
      return multiply_block<6>(weights, q, q_stride, sums);
    case 7:
      return multiply_block<7>(weights, q, q_stride, sums);
    default:
      return multiply_block<8>(weights, q, q_stride, sums);
  }
}

template <int K>
void block_many_rows(const BandArgs& args, uint32_t b, const uint8_t* tile, size_t stride, const RowFactors* rows, Scratch& scratch,
                     int column) {
  decode_block<K>(tile, stride, scratch.weights);
  const size_t q_stride = static_cast<size_t>(args.in_blocks) * kBlock;
  __m256i sums[MOE_MAX_ROWS][kGroups];
  multiply_rows(args.rows, scratch.weights, args.q + b * kBlock, q_stride, sums);
  for (uint32_t m = 0; m < args.rows; ++m) {
    float* z = scratch.z[m][b / group_blocks(args.in_blocks)][column];
    add_to_z(column_sums(sums[m]), rows[m], z);
    add_to_z(column_sums(sums[m] + 4), rows[m], z + 8);
  }
}

/* (G0 + G1) + (G2 + G3), with the columns brought into order. */
void store_z(const BandArgs& args, const Scratch& scratch) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (uint32_t m = 0; m < args.rows; ++m) {
    for (int tile = 0; tile < kTiles; ++tile) {
      for (int half = 0; half < 16; half += 8) {
        const auto group = [&](int g) { return _mm256_load_ps(scratch.z[m][g][tile] + half); };
        const __m256 z = _mm256_add_ps(_mm256_add_ps(group(0), group(1)), _mm256_add_ps(group(2), group(3)));
        _mm256_storeu_ps(args.z + m * kBlock + tile * 16 + half, _mm256_permutevar8x32_ps(z, order));
      }
    }
  }
}

template <int K>
void band_mul1(const BandArgs& args) {
  Scratch& scratch = *static_cast<Scratch*>(args.scratch);
  memset(scratch.z, 0, args.rows * sizeof scratch.z[0]);
  const size_t stride = static_cast<size_t>(args.out_tiles) * 32 * K; /* bytes from a tile to the one below it */
  const uint8_t* top = reinterpret_cast<const uint8_t*>(args.trellis) + static_cast<size_t>(args.band) * kTiles * 32 * K;
  const uint32_t length = group_blocks(args.in_blocks);
  for (uint32_t b = 0; b < args.in_blocks; ++b) {
    RowFactors rows[MOE_MAX_ROWS];
    for (uint32_t m = 0; m < args.rows; ++m) rows[m] = row_factors(args, m, b);
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint8_t* at = top + b * kTiles * stride + tile * 32 * K;
      if (args.rows == 1) {
        block_one_row<K>(at, stride, args.q + b * kBlock, rows[0], scratch.z[0][b / length][tile]);
      } else {
        block_many_rows<K>(args, b, at, stride, rows, scratch, tile);
      }
    }
  }
  store_z(args, scratch);
}

}  // namespace

void glm53::band_mul1_avx2(const BandArgs& args) {
  switch (args.k) {
    case 1:
      return band_mul1<1>(args);
    case 2:
      return band_mul1<2>(args);
    case 3:
      return band_mul1<3>(args);
    case 4:
      return band_mul1<4>(args);
    case 5:
      return band_mul1<5>(args);
    case 6:
      return band_mul1<6>(args);
    case 7:
      return band_mul1<7>(args);
    default:
      return band_mul1<8>(args);
  }
}
