/* The GPU kernel's way through a tile, checked on a machine without a GPU: the device header is compiled for the host with stand-ins for
 * the few CUDA built-ins that it names (not the mma instruction). Every lane's products must be those of the weights that the fragment
 * layout of m16n8k32 and docs/arithmetic.md put there. Prints "ok", or the first difference. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <utility>

#include "cpu/trellis.h"

#define __device__
#define __forceinline__ inline
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> shift);
}
static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(both >> (8 * ((selectors >> (4 * i)) & 7u)) & 255u) << (8 * i);
  return out;
}
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define asm(...)
#define kMul1Multiplier kMul1MultiplierOfTheGpu /* the CPU's header has the same name */
#include "cuda/int_expert_tiles.cuh"
#undef kMul1Multiplier
#undef asm

namespace {

using namespace glm53;

/* Input row and output column (less g) of the weight whose product stands in register `a` of fragment A of add_inputs<Q, Half>. */
constexpr int row_of(int q, int half, int a) { return 2 * q + 8 * half + a / 2; }
constexpr int column_of(int a) { return 8 * (a % 2); }
constexpr int kPositions[4] = {0, 4, 1, 5}; /* the order in which add_inputs asks for them */

uint32_t byte_sum(uint32_t x) { return (x & 255u) + (x >> 8 & 255u) + (x >> 16 & 255u) + (x >> 24); }

template <int K, int... U>
void all_products(const States<K>& states, uint32_t* out, std::integer_sequence<int, U...>) {
  ((out[U] = product<U>(states)), ...);
}

template <int K>
bool check_tile(const uint32_t* tile, const PowersOfTwo& powers) {
  uint16_t states[kTileWeights];
  tile_states(reinterpret_cast<const uint16_t*>(tile), K, states);
  for (uint32_t g = 0; g < 8; ++g) {
    uint32_t words[K + 1], products[32];
    load_words<K>(tile + K * g, tile[(g == 0 ? 8 * K : K * g) - 1], words);
    all_products<K>(States<K>(words, powers), products, std::make_integer_sequence<int, 32>{});
    for (int i = 0; i < 32; ++i) {
      const int q = i / 8, half = i / 4 % 2, a = i % 4;
      const uint32_t found = byte_sum(products[8 * q + 2 * half + kPositions[a]]);
      const uint32_t position = tile_position(static_cast<uint32_t>(row_of(q, half, a)), g + static_cast<uint32_t>(column_of(a)));
      const uint32_t expected = static_cast<uint32_t>(mul1_byte_sum(states[position]));
      if (found == expected) continue;
      printf("K = %d, lane group %u, Q = %d, half %d, register %d: byte sum %u instead of %u\n", K, g, q, half, a, found, expected);
      return false;
    }
  }
  return true;
}

template <int K>
bool check(uint64_t seed) {
  PowersOfTwo powers;
  for (int i = 0; i < 17; ++i) powers.v[i] = 1u << i;
  for (int round = 0; round < 200; ++round) {
    alignas(16) uint32_t tile[8 * K];
    for (uint32_t& word : tile) {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      word = static_cast<uint32_t>(seed >> 32);
    }
    if (!check_tile<K>(tile, powers)) return false;
  }
  return true;
}

}  // namespace

int main() {
  if (!check<2>(1) || !check<3>(2) || !check<4>(3)) return 1;
  printf("ok\n");
  return 0;
}
