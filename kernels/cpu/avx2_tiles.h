/* AVX2: the states of an EXL3 tile as 16-bit lanes, for every K. Only for files compiled with AVX2.
 *
 * Eight consecutive windows ("a run", T = t / 8 in the order of the stream) advance exactly K bytes, so every run starts on a byte and the
 * shifts are constants that all 32 runs share. A vector holds eight runs as dwords: a big-endian dword of the stream that starts at a fixed
 * byte of each run. Shifting it puts one window into the low half and its successor into the high half.
 * Runs 8a .. 8a+7 are columns 2a and 2a+1 (the two 128-bit halves), and inside a half the four dwords are q = 0..3. Windows 0..7 of a run:
 *   (0, 1) rows 2q, 2q+1     (2, 3) rows 2q+8, 2q+9     of that column
 *   (4, 5) and (6, 7)        the same rows              of the column + 8
 * so the two lanes of a dword are two adjacent inputs of one output: what vpmaddwd wants.
 */
#ifndef GLM53_CPU_AVX2_TILES_H_
#define GLM53_CPU_AVX2_TILES_H_

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace glm53 {

constexpr int kPairs = 4; /* pairs of windows in a run */

/* Which dwords of a run are taken, and from which one each window comes. */
struct WindowPlan {
  int num;
  int byte_at[4]; /* first byte of each dword, relative to the run */
  int of[8];
};

/* Each dword starts at the byte of the first window that is not covered yet. */
constexpr WindowPlan greedy_plan(int k) {
  WindowPlan plan = {};
  for (int j = 0; j < 8; ++j) {
    const int end = (j + 1) * k;
    if (plan.num == 0 || end > 8 * plan.byte_at[plan.num - 1] + 32) {
      const int start = end - 16;
      plan.byte_at[plan.num++] = start >= 0 ? start / 8 : -((7 - start) / 8);
    }
    plan.of[j] = plan.num - 1;
  }
  return plan;
}

/* K = 3 has its own: both dwords of four runs then lie in one 16-byte load. */
constexpr WindowPlan window_plan(int k) {
  return k == 3   ? WindowPlan{2, {-2, -1, 0, 0}, {0, 0, 0, 0, 1, 1, 1, 1}}
         : k == 4 ? WindowPlan{2, {-2, 0, 0, 0}, {0, 0, 0, 1, 1, 1, 1, 1}}
                  : greedy_plan(k);
}

static inline __m256i load_halves(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}

/* 16 bytes that start one word before the tile: its last word, then its first three. last: the tile's last 16 bytes. */
static inline __m128i load_wrapped(const uint8_t* tile, const uint8_t* last) {
  return _mm_alignr_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile)), _mm_loadu_si128(reinterpret_cast<const __m128i*>(last)),
                         12);
}

/* Control bytes of a shuffle. */
struct Shuffle {
  alignas(32) uint8_t at[32];
};

/* Makes dword q of a half from bytes first + step * q .. + 3 of the stream; byte i of the stream is byte i ^ 3 in memory. */
constexpr Shuffle dword_shuffle(int first, int step) {
  Shuffle shuffle = {};
  for (int i = 0; i < 32; ++i) shuffle.at[i] = static_cast<uint8_t>((first + step * (i % 16 / 4) + 3 - i % 4) ^ 3);
  return shuffle;
}
/* Reverses the bytes of each dword. */
constexpr Shuffle reverse_shuffle() {
  Shuffle shuffle = {};
  for (int i = 0; i < 32; ++i) shuffle.at[i] = static_cast<uint8_t>((i % 16) ^ 3);
  return shuffle;
}
constexpr Shuffle kReverse = reverse_shuffle();
constexpr Shuffle kRunsOf2 = dword_shuffle(2, 2);
constexpr Shuffle kRunsOf3First = dword_shuffle(2, 3);
constexpr Shuffle kRunsOf3Second = dword_shuffle(3, 3);

static inline __m256i shuffle(__m256i bytes, const Shuffle& control) {
  return _mm256_shuffle_epi8(bytes, _mm256_load_si256(reinterpret_cast<const __m256i*>(control.at)));
}

/* Loads the dwords of runs 8a .. 8a+7. The general form copies the tile into stream order and gathers. */
template <int K>
class TileReader {
 public:
  void open(const uint8_t* tile) {
    for (int i = 0; i < K; ++i) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32 * i));
      _mm256_store_si256(reinterpret_cast<__m256i*>(stream_ + 32 + 32 * i), shuffle(words, kReverse));
    }
    memcpy(stream_ + 28, stream_ + 32 + 32 * K - 4, 4);
  }

  void dwords(int a, __m256i* out) const {
    constexpr WindowPlan kPlan = window_plan(K);
    const __m256i index = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(K));
    for (int d = 0; d < kPlan.num; ++d) {
      const uint8_t* base = stream_ + 32 + K * 8 * a + kPlan.byte_at[d];
      out[d] = shuffle(_mm256_i32gather_epi32(reinterpret_cast<const int*>(base), index, 1), kReverse);
    }
  }

 private:
  alignas(32) uint8_t stream_[32 + 32 * K + 32] = {};
};

template <>
class TileReader<2> {
 public:
  void open(const uint8_t* tile) { tile_ = tile; }

  void dwords(int a, __m256i* out) const {
    const __m128i low = a == 0 ? load_wrapped(tile_, tile_ + 48) : _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile_ + 16 * a - 4));
    const __m128i high = a == 3 ? _mm_srli_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile_ + 48)), 4)
                                : _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile_ + 16 * a + 4));
    out[0] = shuffle(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), kRunsOf2);
  }

 private:
  const uint8_t* tile_;
};

template <>
class TileReader<3> {
 public:
  void open(const uint8_t* tile) { tile_ = tile; }

  void dwords(int a, __m256i* out) const {
    const uint8_t* high = tile_ + 24 * a + 8;
    const __m256i bytes = a == 0 ? _mm256_inserti128_si256(_mm256_castsi128_si256(load_wrapped(tile_, tile_ + 80)),
                                                           _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1)
                                 : load_halves(tile_ + 24 * a - 4, high);
    out[0] = shuffle(bytes, kRunsOf3First);
    out[1] = shuffle(bytes, kRunsOf3Second);
  }

 private:
  const uint8_t* tile_;
};

template <>
class TileReader<4> {
 public:
  void open(const uint8_t* tile) { tile_ = tile; }

  /* A run is one word: the second dword is the word itself, the first straddles it and the word before. */
  void dwords(int a, __m256i* out) const {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile_ + 32 * a));
    const __m256i before = a == 0 ? _mm256_inserti128_si256(_mm256_castsi128_si256(load_wrapped(tile_, tile_ + 112)),
                                                            _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile_ + 12)), 1)
                                  : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile_ + 32 * a - 4));
    out[0] = _mm256_or_si256(_mm256_slli_epi32(before, 16), _mm256_srli_epi32(words, 16));
    out[1] = words;
  }

 private:
  const uint8_t* tile_;
};

/* Window j in the low (0) or high (1) half of each dword; the other half is noise. */
template <int K, int J, int Half>
static inline __m256i place_window(const __m256i* dwords) {
  constexpr WindowPlan kPlan = window_plan(K);
  constexpr int kEnd = (J + 1) * K - 8 * kPlan.byte_at[kPlan.of[J]];
  static_assert(kEnd >= 16 && kEnd <= 32, "the window lies inside its dword");
  const __m256i dword = dwords[kPlan.of[J]];
  if constexpr (Half == 0) return kEnd == 32 ? dword : _mm256_srli_epi32(dword, 32 - kEnd);
  return kEnd == 16 ? dword : _mm256_slli_epi32(dword, kEnd - 16);
}

template <int K, int Pair>
static inline __m256i window_pair(const __m256i* dwords) {
  /* In parentheses: without optimisation the intrinsic is a macro, which would split at the commas. */
  return _mm256_blend_epi16((place_window<K, 2 * Pair, 0>(dwords)), (place_window<K, 2 * Pair + 1, 1>(dwords)), 0xAA);
}

/* All four pairs of windows of runs 8a .. 8a+7. */
template <int K>
static inline void run_states(const TileReader<K>& reader, int a, __m256i* pairs) {
  __m256i dwords[4];
  reader.dwords(a, dwords);
  pairs[0] = window_pair<K, 0>(dwords);
  pairs[1] = window_pair<K, 1>(dwords);
  pairs[2] = window_pair<K, 2>(dwords);
  pairs[3] = window_pair<K, 3>(dwords);
}

}  // namespace glm53

#endif /* GLM53_CPU_AVX2_TILES_H_ */
