/* The band kernel as it is written for vectors of two tiles (AVX-512), run on pairs of 256-bit vectors and compared with the scalar kernel:
 * its order of tiles and halfwords is tested on machines without AVX-512. What stays untested there are the 512-bit instructions
 * themselves. Exit code 0: every bit was equal. */
#include <stdio.h>
#include <string.h>

#include <random>
#include <vector>

#include "cpu/mul1_band.h"
#include "cpu/mul1_traits_256.h"
#include "cpu/trellis.h"
#include "cpu/variants.h"

namespace {

using namespace glm53;

struct Half : Vectors256 {};

/* Vectors512 in two halves. */
struct Wide {
  struct V {
    __m256i left, right;
  };
  static constexpr int kTiles = 2;
  static constexpr int kSteps = 8;
  static constexpr int kInputWords = 1;
  static constexpr int kRowsAtOnce = 8;

  static void pin(V&) {}
  static V load(const uint8_t* at, size_t next) { return {Half::load(at, 0), Half::load(at + next, 0)}; }
  static V load_whole(const uint8_t* at) { return {Half::load_whole(at), Half::load_whole(at + 32)}; }
  static void store_whole(uint8_t* at, V v) {
    Half::store_whole(at, v.left);
    Half::store_whole(at + 32, v.right);
  }
  static V zero() { return {Half::zero(), Half::zero()}; }
  static V set16(int16_t value) { return {Half::set16(value), Half::set16(value)}; }
  static V set8(int8_t value) { return {Half::set8(value), Half::set8(value)}; }
  static V broadcast(const int32_t* x) { return {Half::broadcast(x), Half::broadcast(x)}; }
  static V add16(V a, V b) { return {Half::add16(a.left, b.left), Half::add16(a.right, b.right)}; }
  static V mul_low(V a, V b) { return {Half::mul_low(a.left, b.left), Half::mul_low(a.right, b.right)}; }
  static V mul_high(V a, V b) { return {Half::mul_high(a.left, b.left), Half::mul_high(a.right, b.right)}; }
  static V byte_pairs(V a, V b) { return {Half::byte_pairs(a.left, b.left), Half::byte_pairs(a.right, b.right)}; }
  template <int Shift>
  static V funnel(V a, V b) {
    return {Half::funnel<Shift>(a.left, b.left), Half::funnel<Shift>(a.right, b.right)};
  }
  template <int Mask>
  static V blend32(V a, V b) {
    return {Half::blend32<Mask>(a.left, b.left), Half::blend32<Mask>(a.right, b.right)};
  }
  template <int Mask>
  static V blend16(V a, V b) {
    return {Half::blend16<Mask>(a.left, b.left), Half::blend16<Mask>(a.right, b.right)};
  }
  static V shuffle(V a, const uint8_t* control) { return {Half::shuffle(a.left, control), Half::shuffle(a.right, control)}; }
  static V unpack_low32(V a, V b) { return {Half::unpack_low32(a.left, b.left), Half::unpack_low32(a.right, b.right)}; }
  static V unpack_high32(V a, V b) { return {Half::unpack_high32(a.left, b.left), Half::unpack_high32(a.right, b.right)}; }
  static V unpack_low64(V a, V b) { return {Half::unpack_low64(a.left, b.left), Half::unpack_low64(a.right, b.right)}; }
  static V unpack_high64(V a, V b) { return {Half::unpack_high64(a.left, b.left), Half::unpack_high64(a.right, b.right)}; }
  static V move_up(V a) { return {Half::move_up(a.left), Half::move_up(a.right)}; }
  static __m256i columns_0_7(V low, V, int tile) { return tile == 0 ? low.left : low.right; }
  static __m256i columns_8_15(V, V high, int tile) { return tile == 0 ? high.left : high.right; }
  static __m256i sum(__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
  static V multiply_add(V s, V a, V b) { return {sum(s.left, a.left, b.left), sum(s.right, a.right, b.right)}; }
  static void multiply_add_two(V& low, V& high, V a, V b, V x) {
    low = multiply_add(low, a, x);
    high = multiply_add(high, b, x);
  }
};

/* Wide for lanes: the byte permutation and the multishift in scalar code. */
struct WideLanes : Wide {
  static constexpr int kTiles = 1;
  static constexpr int kSteps = 4;
  static constexpr int kInputWords = 4;

  static V load_bytes(const uint8_t* at) {
    alignas(64) uint8_t bytes[64];
    memcpy(bytes, at, sizeof bytes);
    return load_whole(bytes);
  }
  static V load_last_word(V a, const uint8_t* at) {
    alignas(64) uint8_t bytes[64];
    store_whole(bytes, a);
    memcpy(bytes + 60, at + 60, 4);
    return load_whole(bytes);
  }
  static V permute_bytes(const uint8_t* places, V a) {
    alignas(64) uint8_t from[64], to[64];
    store_whole(from, a);
    for (int i = 0; i < 64; ++i) to[i] = from[places[i] % 64];
    return load_whole(to);
  }
  static V cut(V control, const uint8_t* quadwords) {
    alignas(64) uint8_t offsets[64], to[64];
    store_whole(offsets, control);
    for (int i = 0; i < 64; ++i) {
      uint64_t quadword;
      memcpy(&quadword, quadwords + i / 8 * 8, sizeof quadword);
      const int offset = offsets[i] % 64;
      to[i] = static_cast<uint8_t>(offset == 0 ? quadword : quadword >> offset | quadword << (64 - offset));
    }
    return load_whole(to);
  }
  static V broadcast(const int32_t* x) {
    const __m256i four = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(x)));
    return {four, four};
  }
  static __m256i columns_0_7(V low, V high, int) { return columns(low, high, 0); }
  static __m256i columns_8_15(V low, V high, int) { return columns(low, high, 1); }
  static __m256i columns(V low, V high, int first) {
    alignas(64) uint32_t from[32];
    store_whole(reinterpret_cast<uint8_t*>(from), low);
    store_whole(reinterpret_cast<uint8_t*>(from + 16), high);
    alignas(32) uint32_t to[8];
    for (int c = 0; c < 8; ++c) to[c] = from[4 * c + first] + from[4 * c + 2 + first];
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(to));
  }
};

struct alignas(64) Scratch {
  uint8_t bytes[kBandScratchBytes];
};

/* One matrix of in_blocks x 2 bands with random bits; true when both bands have the scalar kernel's bits for this number of rows, computed
 * by every way that there is for it. */
bool equal(std::mt19937_64& random, uint32_t k, uint32_t in_blocks, uint32_t rows, uint32_t layout, Scratch* scratch) {
  const uint32_t out_tiles = 2 * kBlockTiles;
  std::vector<uint16_t> trellis(size_t{in_blocks} * kBlockTiles * out_tiles * 16 * k);
  std::vector<int16_t> q(size_t{rows} * in_blocks * kBlock);
  std::vector<float> scale(rows * in_blocks);
  std::vector<int32_t> sum(rows * in_blocks, 0);
  for (uint16_t& bits : trellis) bits = static_cast<uint16_t>(random());
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<int16_t>(static_cast<int32_t>(random() % 65279u) - 32639);
    sum[i / kBlock] += q[i];
  }
  for (float& s : scale) s = 1.0f + static_cast<float>(random() % 1000) * 0.001f;
  for (uint32_t band = 0; band < 2; ++band) {
    std::vector<float> expected(kGroups * rows * kBlock, 7.0f), found(expected);
    BandArgs args = {trellis.data(), in_blocks, out_tiles,    k,          MOE_CODEBOOK_MUL1, layout,        band, 0, kGroups,
                     rows,           q.data(),  scale.data(), sum.data(), expected.data(),   scratch->bytes};
    kScalarOps.band(args);
    args.groups = found.data();
    band_mul1<Wide>(args);
    if (memcmp(expected.data(), found.data(), expected.size() * sizeof(float)) != 0) return false;
    std::vector<float> lanes(expected.size(), 7.0f);
    args.groups = lanes.data();
    const bool has_lanes = band_mul1_lanes<WideLanes>(args);
    if (has_lanes != (layout == MOE_LAYOUT_NATIVE && k >= 2 && k <= 4)) return false;
    if (has_lanes && memcmp(expected.data(), lanes.data(), expected.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace

int main() {
  if (!moe_variant_available(MOE_VARIANT_AVX2)) {
    printf("this host has no AVX2\n");
    return 0;
  }
  std::mt19937_64 random(7);
  Scratch scratch;
  int wrong = 0, all = 0;
  for (uint32_t k = 1; k <= 8; ++k) {
    for (uint32_t rows = 1; rows <= MOE_MAX_ROWS; ++rows) {
      for (const uint32_t layout : {MOE_LAYOUT_NATIVE, MOE_LAYOUT_PLANAR}) {
        const uint32_t in_blocks = 1 + (k + rows) % 6;
        const bool same = equal(random, k, in_blocks, rows, layout, &scratch);
        if (!same) fprintf(stderr, "K = %u, %u rows, %u blocks, layout %u differ\n", k, rows, in_blocks, layout);
        wrong += !same;
        ++all;
      }
    }
  }
  printf("%d of %d matrices had the scalar kernel's bits\n", all - wrong, all);
  return wrong == 0 ? 0 : 1;
}
