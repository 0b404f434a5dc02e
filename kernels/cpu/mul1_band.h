/* Steps 4 and 5 for MUL1, written once for every vector width. A file that includes this supplies the traits S of its instruction set.
 * Where a tile's bits and states lie is told in mul1_columns.h.
 *
 * Lanes 2c and 2c + 1 are two inputs, four rows apart, of column c (i mod 8 < 4) or c + 8: one vpmaddwd with a broadcast pair of inputs
 * adds both to a 32-bit sum per column. With traits of lanes a 32-bit sum is that of two inputs, one row apart, of a lane and a column; the
 * two lanes of a column meet at the end of the block. Sums may wrap on the way; the offset 510 * S leaves at the end of the block, and the
 * end value fits.
 *
 * Every vector instruction stands in the order in which it should enter the scheduler: while one pair of states is extracted, the pair
 * before it is multiplied and the pair before that one is summed (pin() keeps a compiler from undoing this), since the chain of one state
 * is longer than what a processor sees ahead.
 */
#ifndef GLM53_CPU_MUL1_BAND_H_
#define GLM53_CPU_MUL1_BAND_H_

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "cpu/kernel_ops.h"
#include "cpu/mul1_columns.h"
#include "cpu/numerics.h"
#include "cpu/trellis.h"
#include "moe_expert.h"

namespace glm53 {
namespace {

/* Native: rows of tiles from the one that is read to the one that is fetched from memory. All rows of a band meet in the same sets of the
 * first cache: while one waits there, each row read and each row fetched takes a place, so that with 8 or 12 places no more than 4 may
 * wait. */
constexpr int kRowsAhead = 4;

/* Steps of one column of a block: each is two vectors of states that share their inputs. */
template <class S>
constexpr int kBlockSteps = kColumnTiles * S::kSteps;

/* Byte sums of one column of tiles of a block, and the block's inputs. The first pair that leaves the pipeline is zeros for
 * index -1: there is room below. */
template <class S>
struct BlockScratch {
  int32_t before_x[16];                              /* read for index -1, times zero */
  alignas(64) int32_t x[MOE_MAX_ROWS][kBlockInputs]; /* S::kInputWords words for each step */
  Vec<S> below[2];
  Vec<S> weights[kBlockSteps<S>][2];
  alignas(64) uint8_t columns[2][kColumnTiles * kColumnTiles * 32 * kMaxBits]; /* native blocks, rearranged: this one and the next */
};

/* Adds byte sums times inputs of one row to two vectors of sums. */
template <class S>
struct MultiplySink {
  const int32_t* x;
  Vec<S> low, high;
  GLM53_INLINE void take(int index, Vec<S> b0, Vec<S> b1) {
    S::multiply_add_two(low, high, b0, b1, S::broadcast(x + index * S::kInputWords));
  }
};

/* Keeps byte sums for several rows. */
template <class S>
struct StoreSink {
  Vec<S> (*weights)[2];
  GLM53_INLINE void take(int index, Vec<S> b0, Vec<S> b1) {
    weights[index][0] = b0;
    weights[index][1] = b1;
  }
};

/* The two youngest generations of pairs of states on their way to byte sums. */
template <class S>
struct Pipeline {
  Vec<S> s0, s1;                 /* states */
  Vec<S> l0, l1, k0, k1, h0, h1; /* products of the pair before: low halves, carries, high halves */
};

template <class S>
struct HashFactors {
  Vec<S> low, high; /* halves of the multiplier */
  Vec<S> ones;
};

/* The pair of step P is multiplied, that of step P + 1 extracted (from the next tile after the last), that of step P - 1 leaves as byte
 * sums. */
template <class S, int P, class Held, class Sink>
GLM53_INLINE void step(const uint8_t* tile, const Held& held, const HashFactors<S>& factors, Pipeline<S>& q, Sink& sink, int index) {
  Vec<S> h0 = S::add16(q.h0, q.k0);
  S::pin(h0);
  Vec<S> h1 = S::add16(q.h1, q.k1);
  S::pin(h1);
  Vec<S> l0 = S::byte_pairs(q.l0, factors.ones);
  S::pin(l0);
  Vec<S> l1 = S::byte_pairs(q.l1, factors.ones);
  S::pin(l1);
  Vec<S> e0 = S::mul_low(q.s0, factors.low);
  S::pin(e0);
  Vec<S> e1 = S::mul_low(q.s1, factors.low);
  S::pin(e1);
  __asm__ volatile("" : "+r"(tile)); /* a load here, not a register kept from the step before */
  Vec<S> n0, n1;
  held.template states<(P + 1) % S::kSteps>(tile, n0, n1);
  S::pin(n0);
  S::pin(n1);
  h0 = S::byte_pairs(h0, factors.ones);
  S::pin(h0);
  h1 = S::byte_pairs(h1, factors.ones);
  S::pin(h1);
  Vec<S> f0 = S::mul_high(q.s0, factors.low);
  S::pin(f0);
  Vec<S> f1 = S::mul_high(q.s1, factors.low);
  S::pin(f1);
  Vec<S> b0 = S::add16(l0, h0);
  S::pin(b0);
  Vec<S> b1 = S::add16(l1, h1);
  S::pin(b1);
  Vec<S> g0 = S::mul_low(q.s0, factors.high);
  S::pin(g0);
  Vec<S> g1 = S::mul_low(q.s1, factors.high);
  S::pin(g1);
  sink.take(index - 1, b0, b1);
  q = {n0, n1, e0, e1, f0, f1, g0, g1};
}

/* Steps P and later of a tile but the last one. */
template <class S, int P, class Held, class Sink>
GLM53_INLINE void steps(const uint8_t* tile, const Held& held, const HashFactors<S>& factors, Pipeline<S>& q, Sink& sink, int index) {
  if constexpr (P < S::kSteps - 1) {
    step<S, P>(tile, held, factors, q, sink, index + P);
    steps<S, P + 1>(tile, held, factors, q, sink, index);
  }
}

/* Eight tiles, one below the other (and their right neighbours), from top to bottom. Index -1 of the sink gets zeros. ahead: distance of
 * the bytes to prefetch, 0: none. */
template <class S, int K, class Columns, class Sink>
GLM53_INLINE void run_column(const uint8_t* tile, size_t ahead, Sink& sink) {
  const HashFactors<S> factors = {S::set16(static_cast<int16_t>(kMul1Multiplier & 0xFFFFu)),
                                  S::set16(static_cast<int16_t>(kMul1Multiplier >> 16)), S::set8(1)};
  typename Columns::template Held<S, K> held;
  held.enter(tile);
  Pipeline<S> q = {};
  held.template states<0>(tile, q.s0, q.s1);
  for (int kt = 0; kt < kColumnTiles; ++kt) {
    for (int t = 0; t < S::kTiles && ahead != 0; ++t) {
      const uint8_t* later = tile + t * kColumnTiles * 32 * K + ahead;
      _mm_prefetch(reinterpret_cast<const char*>(later), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(later + 64), _MM_HINT_T0);
    }
    const int at = kt * S::kSteps;
    steps<S, 0>(tile, held, factors, q, sink, at);
    tile += kt + 1 < kColumnTiles ? Columns::template stride<S, K>() : 0; /* the last one is loaded again and not used */
    held.enter(tile);
    step<S, S::kSteps - 1>(tile, held, factors, q, sink, at + S::kSteps - 1);
  }
  const Vec<S> ones = factors.ones;
  const Vec<S> b0 = S::add16(S::byte_pairs(q.l0, ones), S::byte_pairs(S::add16(q.h0, q.k0), ones));
  const Vec<S> b1 = S::add16(S::byte_pairs(q.l1, ones), S::byte_pairs(S::add16(q.h1, q.k1), ones));
  sink.take(kBlockSteps<S> - 1, b0, b1);
}

/* What one row contributes beside its sums. */
struct RowFactors {
  int32_t offset; /* 510 * S, wrapped */
  float constant; /* -238 * S */
  float scale;    /* s * 2^-17 */
};

/* z gains a block's sums of eight columns (raw: sums of B * q). */
GLM53_INLINE void add_to_z(__m256i raw, const RowFactors& row, float* z) {
  const __m256 a = _mm256_cvtepi32_ps(_mm256_sub_epi32(raw, _mm256_set1_epi32(row.offset)));
  const __m256 t = _mm256_fmadd_ps(_mm256_set1_ps(887.0f), a, _mm256_set1_ps(row.constant));
  _mm256_storeu_ps(z, _mm256_fmadd_ps(t, _mm256_set1_ps(row.scale), _mm256_loadu_ps(z)));
}

template <class S>
GLM53_INLINE void add_columns(Vec<S> low, Vec<S> high, const RowFactors& row, float* z) {
  for (int t = 0; t < S::kTiles; ++t) {
    add_to_z(S::columns_0_7(low, high, t), row, z + 16 * t);
    add_to_z(S::columns_8_15(low, high, t), row, z + 16 * t + 8);
  }
}

/* Where a block's sums go: z of row m is z + m * kBlock. */
template <class S, int Rows>
void multiply_rows(const BlockScratch<S>& block, int first, const RowFactors* rows, float* z) {
  Vec<S> low[Rows], high[Rows];
  for (int m = 0; m < Rows; ++m) low[m] = high[m] = S::zero();
#pragma GCC unroll 2
  for (int i = 0; i < kBlockSteps<S>; ++i) {
    const Vec<S> w0 = block.weights[i][0];
    const Vec<S> w1 = block.weights[i][1];
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const Vec<S> inputs = S::broadcast(&block.x[first + m][i * S::kInputWords]);
      low[m] = S::multiply_add(low[m], w0, inputs);
      high[m] = S::multiply_add(high[m], w1, inputs);
    }
  }
  for (int m = 0; m < Rows; ++m) add_columns<S>(low[m], high[m], rows[first + m], z + (first + m) * kBlock);
}

template <class S>
void multiply_any(const BlockScratch<S>& block, int num_rows, const RowFactors* rows, float* z) {
  int first = 0;
  while (first < num_rows) {
    const int left = num_rows - first;
    const int now = left <= S::kRowsAtOnce ? left : left <= S::kRowsAtOnce + 2 && left > 3 ? (left + 1) / 2 : S::kRowsAtOnce;
    switch (now) {
      case 1:
        multiply_rows<S, 1>(block, first, rows, z);
        break;
      case 2:
        multiply_rows<S, 2>(block, first, rows, z);
        break;
      case 3:
        multiply_rows<S, 3>(block, first, rows, z);
        break;
      case 4:
        multiply_rows<S, 4>(block, first, rows, z);
        break;
      default:
        if constexpr (S::kRowsAtOnce > 4) {
          if (now == 5) multiply_rows<S, 5>(block, first, rows, z);
          if (now == 6) multiply_rows<S, 6>(block, first, rows, z);
          if (now == 7) multiply_rows<S, 7>(block, first, rows, z);
          if (now == 8) multiply_rows<S, 8>(block, first, rows, z);
        }
    }
    first += now;
  }
}

/* A column of tiles and its right neighbours. */
template <class S, int K, class Columns>
void column(const uint8_t* tile, size_t ahead, BlockScratch<S>& block, int num_rows, const RowFactors* rows, float* z) {
  if (num_rows == 1) {
    MultiplySink<S> sink = {block.x[0], S::zero(), S::zero()};
    run_column<S, K, Columns>(tile, ahead, sink);
    add_columns<S>(sink.low, sink.high, rows[0], z);
    return;
  }
  StoreSink<S> sink = {block.weights};
  run_column<S, K, Columns>(tile, ahead, sink);
  multiply_any<S>(block, num_rows, rows, z);
}

template <class S, int K, class Columns>
void band_of(const BandArgs& args) {
  BlockScratch<S>& block = *static_cast<BlockScratch<S>*>(args.scratch);
  constexpr bool kPlanar = std::is_same_v<Columns, PlanarColumns>;
  constexpr size_t kTileBytes = 32 * K;
  constexpr size_t kBlockBytes = kColumnTiles * kColumnTiles * kTileBytes;
  constexpr size_t kStride = Columns::template stride<S, K>();
  const size_t row_bytes = args.out_tiles * kTileBytes; /* native: to the row of tiles below */
  const uint8_t* top =
      reinterpret_cast<const uint8_t*>(args.trellis) + args.band * (kPlanar ? args.in_blocks * kBlockBytes : kColumnTiles * kTileBytes);
  const uint32_t length = group_blocks(args.in_blocks);
  const uint32_t end = args.end_group * length < args.in_blocks ? args.end_group * length : args.in_blocks;
  const int num_rows = static_cast<int>(args.rows);
  const auto rearrange = [&](uint32_t b, int kt) {
    rearrange_row<S, K, Columns>(top + (static_cast<size_t>(b) * kColumnTiles + kt) * row_bytes, kRowsAhead * row_bytes,
                                 block.columns[b % 2] + kt * kStride);
  };
  if (!kPlanar && args.first_group * length < end) { /* late groups may be empty */
    for (int kt = 0; kt < kColumnTiles; ++kt) rearrange(args.first_group * length, kt);
  }
  for (uint32_t b = args.first_group * length; b < end; ++b) {
    RowFactors rows[MOE_MAX_ROWS];
    for (uint32_t m = 0; m < args.rows; ++m) {
      const int32_t sum = args.sum[m * args.in_blocks + b];
      rows[m] = {static_cast<int32_t>(510u * static_cast<uint32_t>(sum)), -238.0f * static_cast<float>(sum),
                 args.scale[m * args.in_blocks + b] * kTwoPow17Inv};
      const int16_t* const q = args.q + (static_cast<size_t>(m) * args.in_blocks + b) * kBlock;
      if constexpr (std::is_same_v<Columns, LaneColumns>) {
        order_quads(q, block.x[m]);
      } else {
        order_pairs(q, block.x[m]);
      }
    }
    float* z = args.groups + static_cast<size_t>(b / length) * args.rows * kBlock;
    for (int tile = 0; tile < kColumnTiles; tile += S::kTiles) {
      if constexpr (kPlanar) {
        const uint8_t* const at = top + b * kBlockBytes + tile * kColumnTiles * kStride;
        column<S, K, Columns>(at, 2 * kBlockBytes, block, num_rows, rows, z + 16 * tile);
      } else {
        if (b + 1 < end) {
          for (int t = 0; t < S::kTiles; ++t) rearrange(b + 1, tile + t);
        }
        const uint8_t* const at = block.columns[b % 2] + tile / S::kTiles * kColumnTiles * kStride;
        column<S, K, Columns>(at, 0, block, num_rows, rows, z + 16 * tile);
      }
    }
  }
}

template <class S>
void clear_groups(const BandArgs& args) {
  static_assert(sizeof(BlockScratch<S>) <= kBandScratchBytes, "the scratch of a band is too small");
  const uint32_t num_groups = args.end_group - args.first_group;
  memset(args.groups + static_cast<size_t>(args.first_group) * args.rows * kBlock, 0, num_groups * args.rows * kBlock * sizeof(float));
}

template <class S, class Columns>
void band_any(const BandArgs& args) {
  switch (args.k) {
    case 1:
      return band_of<S, 1, Columns>(args);
    case 2:
      return band_of<S, 2, Columns>(args);
    case 3:
      return band_of<S, 3, Columns>(args);
    case 4:
      return band_of<S, 4, Columns>(args);
    case 5:
      return band_of<S, 5, Columns>(args);
    case 6:
      return band_of<S, 6, Columns>(args);
    case 7:
      return band_of<S, 7, Columns>(args);
    default:
      return band_of<S, 8, Columns>(args);
  }
}

template <class S>
void band_mul1(const BandArgs& args) {
  clear_groups<S>(args);
  if (args.layout == MOE_LAYOUT_PLANAR) {
    band_any<S, PlanarColumns>(args);
  } else {
    band_any<S, InterleavedColumns>(args);
  }
}

/* Native records of 2, 3 or 4 bits with traits of lanes; false: another record. */
template <class S>
bool band_mul1_lanes(const BandArgs& args) {
  if (args.layout == MOE_LAYOUT_PLANAR || args.k < 2 || args.k > 4) return false;
  clear_groups<S>(args);
  if (args.k == 2) band_of<S, 2, LaneColumns>(args);
  if (args.k == 3) band_of<S, 3, LaneColumns>(args);
  if (args.k == 4) band_of<S, 4, LaneColumns>(args);
  return true;
}

}  // namespace
}  // namespace glm53

#endif /* GLM53_CPU_MUL1_BAND_H_ */
