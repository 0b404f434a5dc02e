/* Steps 4 and 5 for MUL1, written once for every vector width. A file that includes this supplies the traits S of its instruction set.
 *
 * A tile's stream is a ring of 16 lanes of K halfwords each; lane l holds 16 consecutive states, those of runs T = 2l and 2l + 1. R[m] is
 * the vector of halfword m of every lane, and R[-1] is R[K - 1] moved up by one lane (the ring closes). State i of a lane ends at bit
 * K * (i + 1) of its 16 K bits, so it is one funnel shift of R[m - 1] and R[m] by a constant: no masks, no gathers. The planar layout
 * stores R[0] .. R[K - 1] as they are; a native block is brought into much the same form in the first cache, one block ahead.
 *
 * Lanes 2c and 2c + 1 are two inputs, four rows apart, of column c (i mod 8 < 4) or c + 8: one vpmaddwd with a broadcast pair of inputs
 * adds both to a 32-bit sum per column. Sums may wrap on the way; the offset 510 * S leaves at the end of the block, and the end value
 * fits.
 *
 * A wider vector holds two neighbouring tiles of a row. Where four states of a lane can be cut out of 64 bits by one instruction (traits of
 * lanes), no halfword needs to be moved beside its like: a lane's bits and the 16 before them are a quadword, and a vector's 32-bit sums
 * are those of two inputs, one row apart, of a lane and a column; the two lanes of a column meet at the end of the block.
 *
 * Every vector instruction stands in the order in which it should enter the
 * scheduler: while one pair of states is extracted, the pair before it is multiplied and the pair before that one is summed (pin() keeps
 * a compiler from undoing this), since the chain of one state is longer than what a processor sees ahead.
 */
#ifndef GLM53_CPU_MUL1_BAND_H_
#define GLM53_CPU_MUL1_BAND_H_

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "cpu/kernel_ops.h"
#include "cpu/numerics.h"
#include "cpu/trellis.h"
#include "moe_expert.h"

namespace glm53 {
namespace {

constexpr int kColumnTiles = static_cast<int>(kBlockTiles); /* tiles of a block, in each direction */
constexpr int kBlockInputs = 128;                           /* most 32-bit words of one row's inputs, in the order of the states */
/* Native: rows of tiles from the one that is read to the one that is fetched from memory. All rows of a band meet in the same sets of the
 * first cache: while one waits there, each row read and each row fetched takes a place, so that with 8 or 12 places no more than 4 may
 * wait. */
constexpr int kRowsAhead = 4;

template <class S>
using Vec = typename S::V;

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

/* First state of pair p of a tile, whose other state is four later: 0..3 and 8..11. */
constexpr int pair_state(int p) { return p % 4 + p / 4 * 8; }

/* Columns of tiles where a column reads them: as a planar record has them, neighbours a column apart, or as rearrange_row leaves them. Held
 * is what the steps of a tile share. */
template <class S, int K, class Columns>
struct HeldHalfwords;
template <class S, int K>
struct HeldLanes;

struct PlanarColumns {
  template <class S, int K>
  using Held = HeldHalfwords<S, K, PlanarColumns>;
  template <class S, int K>
  static constexpr size_t stride() {
    return 32 * K;
  }
  template <class S, int K>
  static GLM53_INLINE Vec<S> load(const uint8_t* tile, int halfword) {
    return S::load(tile + 32 * halfword, kColumnTiles * 32 * K);
  }
};
/* A vector's tiles interleaved by halfword, so that each halfword of theirs is one load. */
struct InterleavedColumns {
  template <class S, int K>
  using Held = HeldHalfwords<S, K, InterleavedColumns>;
  template <class S, int K>
  static constexpr size_t stride() {
    return S::kTiles * 32 * K;
  }
  template <class S, int K>
  static GLM53_INLINE Vec<S> load(const uint8_t* tile, int halfword) {
    return S::load_whole(tile + S::kTiles * 32 * halfword);
  }
};
/* Quadwords of lanes 0..7 and 8..15, in as many windows as the states of a lane need. */
struct LaneColumns {
  template <class S, int K>
  using Held = HeldLanes<S, K>;
  /* A window reaches over 16 bits before its first state and the bits of its states: 48 bits of a quadword at most here. */
  template <int K>
  static constexpr int windows() {
    return K == 4 ? 2 : 1;
  }
  template <class S, int K>
  static constexpr size_t stride() {
    return 128 * windows<K>();
  }
};

/* State I of every lane of a tile; before: R[-1]. The halfwords are loaded where they are used: registers are scarcer than loads. */
template <class S, int K, int I, class Columns>
GLM53_INLINE Vec<S> state(const uint8_t* tile, Vec<S> before) {
  constexpr int kEnd = K * (I + 1);
  constexpr int kHalfword = (kEnd - 1) / 16;
  constexpr int kShift = kEnd - 16 * kHalfword;
  const Vec<S> lower = Columns::template load<S, K>(tile, kHalfword);
  if constexpr (kShift == 16) return lower;
  const Vec<S> upper = kHalfword == 0 ? before : Columns::template load<S, K>(tile, kHalfword - 1);
  return S::template funnel<kShift>(upper, lower);
}

/* Control of a shuffle of halfwords inside 128 bits. */
struct Halfwords {
  alignas(16) uint8_t at[16];
};
constexpr Halfwords halfwords(int a, int b, int c, int d, int e, int f, int g, int h) {
  const int order[8] = {a, b, c, d, e, f, g, h};
  Halfwords control = {};
  for (int i = 0; i < 8; ++i) {
    control.at[2 * i] = static_cast<uint8_t>(2 * order[i]);
    control.at[2 * i + 1] = static_cast<uint8_t>(2 * order[i] + 1);
  }
  return control;
}

/* 16 bytes at `low` of a tile and 16 bytes at `high`, one in each half. high must be >= low + 16. */
template <class S, int Low, int High>
GLM53_INLINE Vec<S> halves(const uint8_t* tile, size_t next) {
  return S::template blend32<0xF0>(S::load(tile + Low, next), S::load(tile + High - 16, next));
}

/* Native tile -> r[1..K]. The first half of a tile holds lanes 0..7, the second lanes 8..15; stream halfword i lies at i ^ 1. */
template <class S, int K>
GLM53_INLINE void load_native(const uint8_t* tile, size_t next, Vec<S>* r) {
  static_assert(K == 2 || K == 3 || K == 4, "other bit counts go through a planar copy");
  if constexpr (K == 2) {
    constexpr Halfwords kSplit = halfwords(1, 3, 5, 7, 0, 2, 4, 6);
    const Vec<S> a = S::shuffle(halves<S, 0, 32>(tile, next), kSplit.at);
    const Vec<S> b = S::shuffle(halves<S, 16, 48>(tile, next), kSplit.at);
    r[1] = S::unpack_low64(a, b);
    r[2] = S::unpack_high64(a, b);
  } else if constexpr (K == 3) {
    constexpr Halfwords kFirst = halfwords(1, 2, 7, 0, 5, 6, 3, 4);
    constexpr Halfwords kSecond = halfwords(0, 5, 6, 3, 4, 1, 2, 7);
    constexpr Halfwords kThird = halfwords(3, 4, 1, 2, 7, 0, 5, 6);
    const Vec<S> a = halves<S, 0, 48>(tile, next);
    const Vec<S> b = halves<S, 16, 64>(tile, next);
    const Vec<S> c = halves<S, 32, 80>(tile, next);
    r[1] = S::shuffle(S::template blend16<0x18>(S::template blend16<0x61>(a, b), c), kFirst.at);
    r[2] = S::shuffle(S::template blend16<0x86>(S::template blend16<0x18>(a, b), c), kSecond.at);
    r[3] = S::shuffle(S::template blend16<0x61>(S::template blend16<0x86>(a, b), c), kThird.at);
  } else {
    constexpr Halfwords kSplit = halfwords(1, 5, 0, 4, 3, 7, 2, 6);
    const Vec<S> a = S::shuffle(halves<S, 0, 64>(tile, next), kSplit.at);
    const Vec<S> b = S::shuffle(halves<S, 16, 80>(tile, next), kSplit.at);
    const Vec<S> c = S::shuffle(halves<S, 32, 96>(tile, next), kSplit.at);
    const Vec<S> d = S::shuffle(halves<S, 48, 112>(tile, next), kSplit.at);
    const Vec<S> low_ab = S::unpack_low32(a, b), low_cd = S::unpack_low32(c, d);
    const Vec<S> high_ab = S::unpack_high32(a, b), high_cd = S::unpack_high32(c, d);
    r[1] = S::unpack_low64(low_ab, low_cd);
    r[2] = S::unpack_high64(low_ab, low_cd);
    r[3] = S::unpack_low64(high_ab, high_cd);
    r[4] = S::unpack_high64(high_ab, high_cd);
  }
}

template <class S, int K, class Columns>
struct HeldHalfwords {
  Vec<S> before; /* R[-1] */
  GLM53_INLINE void enter(const uint8_t* tile) { before = S::move_up(Columns::template load<S, K>(tile, K - 1)); }
  template <int P>
  GLM53_INLINE void states(const uint8_t* tile, Vec<S>& n0, Vec<S>& n1) const {
    n0 = state<S, K, pair_state(P), Columns>(tile, before);
    n1 = state<S, K, pair_state(P) + 4, Columns>(tile, before);
  }
};

/* Offset in a tile of the 64 bytes in which lanes 0..7 (half 0) or 8..15 find what a window needs. */
template <int K>
constexpr int lane_load(int half, int window) {
  if (K == 2 || half == 0) return 0;
  return K == 3 ? 32 : window == 0 ? 60 : 64;
}

/* Where a quadword's bytes lie in those 64, by half and window. */
struct LaneBytes {
  alignas(64) uint8_t at[2][2][64];
};
template <int K>
constexpr LaneBytes lane_bytes() {
  LaneBytes bytes = {};
  const int windows = LaneColumns::windows<K>();
  for (int half = 0; half < 2; ++half) {
    for (int window = 0; window < windows; ++window) {
      for (int i = 0; i < 64; ++i) {
        const int last = K * (window + 1) / windows - 1; /* a quadword's lowest halfword, the newest of the window */
        const int behind = i % 8 / 2 <= K / windows ? i % 8 / 2 : 0;
        const int halfword = (K * (8 * half + i / 8) + last - behind + 16 * K) % (16 * K);
        const int byte = 2 * (halfword ^ 1) + i % 2 - lane_load<K>(half, window);
        /* The ring closes: the tile's last word takes the place of the last one loaded. */
        bytes.at[half][window][i] = static_cast<uint8_t>(byte < 64 ? byte : byte - (32 * K - 64));
      }
    }
  }
  return bytes;
}

/* Native tile -> quadwords of lanes. */
template <class S, int K>
GLM53_INLINE void load_lanes(const uint8_t* tile, uint8_t* to) {
  static constexpr LaneBytes kBytes = lane_bytes<K>();
  for (int window = 0; window < LaneColumns::windows<K>(); ++window) {
    Vec<S> first = S::load_bytes(tile);
    if (K > 2 && window == 0) first = S::load_last_word(first, tile + 32 * K - 64);
    const Vec<S> second = S::load_bytes(tile + lane_load<K>(1, window));
    S::store_whole(to + 128 * window, S::permute_bytes(kBytes.at[0][window], first));
    S::store_whole(to + 128 * window + 64, S::permute_bytes(kBytes.at[1][window], second));
  }
}

/* Bit offsets at which the bytes of states i, i + 1, i + 4 and i + 5 lie in a lane's quadword, for i = pair_state(2 * step). */
struct LaneControls {
  alignas(64) uint8_t at[4][64];
};
template <int K>
constexpr LaneControls lane_controls() {
  LaneControls controls = {};
  const int windows = LaneColumns::windows<K>();
  for (int step = 0; step < 4; ++step) {
    for (int byte = 0; byte < 64; ++byte) {
      const int e = byte / 2 % 4;
      const int i = (pair_state(2 * step) + e % 2 + e / 2 * 4) % (16 / windows);
      controls.at[step][byte] = static_cast<uint8_t>(16 * K / windows - K * (i + 1) + byte % 2 * 8);
    }
  }
  return controls;
}

template <class S, int K>
struct HeldLanes {
  static constexpr LaneControls kControls = lane_controls<K>();
  static constexpr int kDistinct = 4 / LaneColumns::windows<K>();
  Vec<S> controls[kDistinct];
  GLM53_INLINE HeldLanes() {
    for (int i = 0; i < kDistinct; ++i) controls[i] = S::load_whole(kControls.at[i]);
  }
  GLM53_INLINE void enter(const uint8_t*) {}
  template <int Step>
  GLM53_INLINE void states(const uint8_t* tile, Vec<S>& n0, Vec<S>& n1) const {
    const uint8_t* const window = tile + 128 * (Step / kDistinct);
    n0 = S::cut(controls[Step % kDistinct], window);
    n1 = S::cut(controls[Step % kDistinct], window + 64);
  }
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

/* Inputs 16 at a time into the order of the pairs: (r, r + 4) for r = 0, 1, 8, 9, 2, 3, 10, 11. */
GLM53_INLINE void order_pairs(const int16_t* q, int32_t* x) {
  const __m256i control = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  for (int kt = 0; kt < kColumnTiles; ++kt) {
    const __m256i rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + 16 * kt));
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(rows, control), 0xD8);
    _mm256_store_si256(reinterpret_cast<__m256i*>(x + 8 * kt), pairs);
  }
}

/* The same for lanes: (r, r + 1) twice, for columns c and c + 8 of an even lane, then (r + 4, r + 5) of an odd one, for r = 0, 8, 2, 10. */
GLM53_INLINE void order_quads(const int16_t* q, int32_t* x) {
  const __m256i first = _mm256_setr_epi32(0, 0, 2, 2, 4, 4, 6, 6);
  const __m256i second = _mm256_setr_epi32(1, 1, 3, 3, 5, 5, 7, 7);
  for (int kt = 0; kt < kColumnTiles; ++kt) {
    const __m256i rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + 16 * kt));
    _mm256_store_si256(reinterpret_cast<__m256i*>(x + 16 * kt), _mm256_permutevar8x32_epi32(rows, first));
    _mm256_store_si256(reinterpret_cast<__m256i*>(x + 16 * kt + 8), _mm256_permutevar8x32_epi32(rows, second));
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

/* One row of tiles of a native block -> columns. The rows of a matrix lie a multiple of 4 KiB apart, so that a walk down a
 * column would keep throwing its own lines out of the first cache; this reads along the row. to: place of the row's first tile. ahead:
 * bytes to prefetch at. */
template <class S, int K, class Columns>
void rearrange_row(const uint8_t* row, size_t ahead, uint8_t* to) {
  constexpr size_t kTileBytes = 32 * K;
  constexpr size_t kRowBytes = kColumnTiles * kTileBytes; /* of native tiles, and from one column of vectors to the next tile's place */
  for (size_t line = 0; line < kRowBytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(row + ahead + line), _MM_HINT_T0);
  if constexpr (std::is_same_v<Columns, LaneColumns>) {
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      load_lanes<S, K>(row + tile * kTileBytes, to + tile * kColumnTiles * Columns::template stride<S, K>());
    }
  } else if constexpr (K == 2 || K == 3 || K == 4) {
    for (int tile = 0; tile < kColumnTiles; tile += S::kTiles) {
      Vec<S> r[K + 1];
      load_native<S, K>(row + tile * kTileBytes, kTileBytes, r);
      for (int m = 0; m < K; ++m) S::store_whole(to + tile * kRowBytes + S::kTiles * 32 * m, r[m + 1]);
    }
  } else {
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      uint16_t from[16 * K], planar[16 * K];
      memcpy(from, row + tile * kTileBytes, sizeof from);
      planar_from_native(from, K, planar);
      uint8_t* const first = to + tile / S::kTiles * S::kTiles * kRowBytes + tile % S::kTiles * 32;
      for (int m = 0; m < K; ++m) memcpy(first + S::kTiles * 32 * m, planar + 16 * m, 32);
    }
  }
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
