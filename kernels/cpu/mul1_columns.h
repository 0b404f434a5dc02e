/* Where MUL1's bits and states lie, for every vector width: tiles as records have them, columns of tiles as the steps of mul1_band.h read
 * them, and the inputs in the order of the states.
 *
 * A tile's stream is a ring of 16 lanes of K halfwords each; lane l holds 16 consecutive states, those of runs T = 2l and 2l + 1. R[m] is
 * the vector of halfword m of every lane, and R[-1] is R[K - 1] moved up by one lane (the ring closes). State i of a lane ends at bit
 * K * (i + 1) of its 16 K bits, so it is one funnel shift of R[m - 1] and R[m] by a constant: no masks, no gathers. The planar layout
 * stores R[0] .. R[K - 1] as they are; a native block is brought into much the same form in the first cache, one block ahead.
 *
 * A wider vector holds two neighbouring tiles of a row. Where four states of a lane can be cut out of 64 bits by one instruction (traits of
 * lanes), no halfword needs to be moved beside its like: a lane's bits and the 16 before them are a quadword.
 */
#ifndef GLM53_CPU_MUL1_COLUMNS_H_
#define GLM53_CPU_MUL1_COLUMNS_H_

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "cpu/kernel_ops.h"
#include "cpu/trellis.h"

namespace glm53 {
namespace {

constexpr int kColumnTiles = static_cast<int>(kBlockTiles); /* tiles of a block, in each direction */
constexpr int kBlockInputs = 128;                           /* most 32-bit words of one row's inputs, in the order of the states */

template <class S>
using Vec = typename S::V;

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

}  // namespace
}  // namespace glm53

#endif /* GLM53_CPU_MUL1_COLUMNS_H_ */
