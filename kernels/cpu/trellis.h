/* EXL3 tiles: the bit stream, the place of a weight in a tile, and the three codebooks (docs/arithmetic.md, section 1). */
#ifndef GLM53_CPU_TRELLIS_H_
#define GLM53_CPU_TRELLIS_H_

#include <stdint.h>
#include <string.h>

#include "cpu/numerics.h"
#include "moe_expert.h"

namespace glm53 {

constexpr uint32_t kTileWeights = 256;
constexpr uint32_t kMaxBits = 8;

constexpr uint32_t kMul1Multiplier = 0x83DCD12Du;
constexpr uint32_t kMcgMultiplier = 0xCBAC1FEDu;
constexpr uint32_t kInstMultiplier = 89226354u;
constexpr uint32_t kInstIncrement = 64248484u;
constexpr uint32_t kInstMask = 0x8FFF8FFFu;
constexpr uint32_t kInstFlip = 0x3B603B60u;

/* uint16 values of one tile. */
static inline uint32_t tile_halfwords(uint32_t k) { return 16u * k; }

/* The 256 states of a tile in stream order. Bits run from the most significant end of little-endian 32-bit words; a state is the 16 bits
 * that end at bit (t + 1) * k of the ring of 256 * k bits, so the first states reach back into the tile's end. */
static inline void tile_states(const uint16_t* tile, uint32_t k, uint16_t* states) {
  const uint32_t num_words = 8u * k;
  uint32_t words[8 * kMaxBits + 1];
  memcpy(words + 1, tile, num_words * sizeof(uint32_t));
  words[0] = words[num_words];
  for (uint32_t t = 0; t < kTileWeights; ++t) {
    const uint32_t end = (t + 1) * k + 32u; /* in bits, counted from words[0] */
    const uint32_t last = (end - 1) / 32u;
    const uint64_t pair = static_cast<uint64_t>(words[last - 1]) << 32 | words[last];
    states[t] = static_cast<uint16_t>(pair >> (32u * (last + 1u) - end));
  }
}

/* Index of tile (kt, nt) in the planar layout: bands of 128 outputs, in each the blocks of 128 inputs, in each the columns of tiles. */
static inline size_t planar_tile(uint32_t kt, uint32_t nt, uint32_t in_blocks) {
  const size_t block = static_cast<size_t>(nt / kBlockTiles) * in_blocks + kt / kBlockTiles;
  return (block * kBlockTiles + nt % kBlockTiles) * kBlockTiles + kt % kBlockTiles;
}

/* A planar tile holds, for m = 0..k-1, halfword m of each of the 16 lanes; lane l is halfwords k l .. k l + k - 1 of the stream. */
static inline void planar_from_native(const uint16_t* native, uint32_t k, uint16_t* planar) {
  for (uint32_t l = 0; l < 16; ++l) {
    for (uint32_t m = 0; m < k; ++m) planar[16 * m + l] = native[(k * l + m) ^ 1u];
  }
}
static inline void native_tile(const uint16_t* planar, uint32_t k, uint16_t* native) {
  for (uint32_t l = 0; l < 16; ++l) {
    for (uint32_t m = 0; m < k; ++m) native[(k * l + m) ^ 1u] = planar[16 * m + l];
  }
}

/* Stream position of the weight in row r (input) and column c (output) of a tile. */
static inline uint32_t tile_position(uint32_t r, uint32_t c) {
  return 8u * (4u * (c % 8u) + (r % 8u) / 2u) + 4u * (c / 8u) + 2u * (r / 8u) + r % 2u;
}

/* Sum of the four bytes of the hashed state, 0..1020. */
static inline int32_t mul1_byte_sum(uint16_t state) {
  const uint32_t x = state * kMul1Multiplier;
  return static_cast<int32_t>((x & 255u) + ((x >> 8) & 255u) + ((x >> 16) & 255u) + (x >> 24));
}

/* The fp16 weight that a GPU decodes, as fp16 bits. */
static inline uint16_t mul1_weight(uint16_t state) {
  /* 887 (B - 510) - 238 in steps of 2^-17 is the exact value of fma(1024 + B, k, b): the conversion is the fma's only rounding. */
  return float_to_half(static_cast<float>(887 * (mul1_byte_sum(state) - 510) - 238) * kTwoPow17Inv);
}

static inline uint16_t inst_weight(uint32_t x) {
  x = (x & kInstMask) ^ kInstFlip;
  /* Rounding an fp16 sum to fp32 first does not change its rounding to fp16: fp32 has more than twice the digits. */
  return float_to_half(half_to_float(static_cast<uint16_t>(x)) + half_to_float(static_cast<uint16_t>(x >> 16)));
}

static inline uint16_t state_weight(uint16_t state, uint32_t codebook) {
  if (codebook == MOE_CODEBOOK_MUL1) return mul1_weight(state);
  if (codebook == MOE_CODEBOOK_MCG) return inst_weight(state * kMcgMultiplier);
  return inst_weight(state * kInstMultiplier + kInstIncrement);
}

}  // namespace glm53

#endif /* GLM53_CPU_TRELLIS_H_ */
