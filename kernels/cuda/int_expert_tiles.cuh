/* From the bits of an EXL3 tile to sums of products: one warp, four tiles along the inputs at a time.
 *
 * A weight of codebook MUL1 is the sum B of the four bytes of state * multiplier. The tensor core does both sums at once: the four bytes
 * stand in one 32-bit register of an m16n8k32 operand A (unsigned bytes), and operand B holds the activation's byte four times, so that
 * the product is B * q. q has 16 bits and goes in as two signed bytes, high and low, in two columns of B: column 2 r is the high byte of
 * row r, column 2 r + 1 the low one. One instruction takes 16 output columns, 8 inputs and 4 rows.
 *
 * Fragments (lane = 4 g + tg): the four slices of 16 inputs of a stage are the four values of tg. Lane (g, tg) holds the 32 weights of
 * columns g and g + 8 of its tile, which are K consecutive words of the tile's stream, and ends with the sums of columns g and g + 8 for
 * row tg. So a lane reads its own bits alone and every shift is known at compile time.
 */
#ifndef GLM53_CUDA_INT_EXPERT_TILES_CUH_
#define GLM53_CUDA_INT_EXPERT_TILES_CUH_

#include <stdint.h>

namespace glm53 {

constexpr uint32_t kMul1Multiplier = 0x83DCD12Du;

/* Powers of two that the compiler does not know: a multiplication by one is a shift in the multiplier's pipe. */
struct PowersOfTwo {
  uint32_t v[17];
};

/* The states of a lane's 32 weights. words[0] is the word before the lane's, words[1..K] are the lane's. */
template <int K>
struct States {
  /* K = 2 and 4: a word that ends where state U ends holds the state of 16 bits earlier in its upper half: one shift serves both. */
  static constexpr int kPairs = 16 / K;
  uint32_t pairs[16];

  __device__ __forceinline__ States(const uint32_t (&words)[K + 1], const PowersOfTwo&) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int word = i / kPairs, shift = 16 - K * (i % kPairs + 1);
      pairs[i] = shift == 0 ? words[word + 1] : __funnelshift_r(words[word + 1], words[word], shift);
    }
  }
  template <int U>
  __device__ __forceinline__ uint32_t get() const {
    constexpr int group = U / (2 * kPairs), place = U % (2 * kPairs);
    const uint32_t pair = pairs[group * kPairs + place % kPairs];
    return place < kPairs ? pair >> 16 : pair & 0xFFFFu;
  }
};

template <>
struct States<3> {
  const uint32_t (&words)[4];
  const PowersOfTwo& powers;

  __device__ __forceinline__ States(const uint32_t (&lane_words)[4], const PowersOfTwo& powers_of_two)
      : words(lane_words), powers(powers_of_two) {}

  template <int U>
  __device__ __forceinline__ uint32_t get() const {
    constexpr int end = 3 * (U + 1), word = (end - 1) / 32, shift = 32 * (word + 1) - end;
    if constexpr (end - 16 < 32 * word) return __funnelshift_r(words[word + 1], words[word], shift) & 0xFFFFu;
    if constexpr (shift == 16) return words[word + 1] >> 16;
    if constexpr (shift == 0) return words[word + 1] & 0xFFFFu;
    if constexpr (shift == 8) return __byte_perm(words[word + 1], 0, 0x4421);
    /* Half of the work in each of the two integer pipes. */
    return (words[word + 1] * powers.v[16 - shift]) >> 16;
  }
};

template <int U, int K>
__device__ __forceinline__ uint32_t product(const States<K>& states) {
  return states.template get<U>() * kMul1Multiplier;
}

__device__ __forceinline__ void multiply_accumulate(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                    const int32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

/* Operand B of a stage: bytes[n][r] is the byte of input row r four times, for the rows 4 n .. 4 n + 3. */
template <int NB>
struct Activations {
  uint32_t bytes[NB][16];

  __device__ __forceinline__ void spread(const uint4 (&packed)[NB]) {
#pragma unroll
    for (int n = 0; n < NB; ++n) {
      const uint32_t words[4] = {packed[n].x, packed[n].y, packed[n].z, packed[n].w};
#pragma unroll
      for (int r = 0; r < 16; ++r) bytes[n][r] = __byte_perm(words[r / 4], 0, 0x1111 * (r % 4));
    }
  }
};

/* Inputs 2 Q, 2 Q + 1 (Half 0) or 2 Q + 8, 2 Q + 9 (Half 1) of the four tiles. */
template <int Q, int Half, int K, int NB>
__device__ __forceinline__ void add_inputs(const States<K>& states, const Activations<NB>& x, int32_t (&sums)[NB][4],
                                           const int32_t (&start)[NB][4]) {
  const uint32_t a[4] = {product<8 * Q + 2 * Half>(states), product<8 * Q + 2 * Half + 4>(states), product<8 * Q + 2 * Half + 1>(states),
                         product<8 * Q + 2 * Half + 5>(states)};
#pragma unroll
  for (int n = 0; n < NB; ++n) multiply_accumulate(sums[n], a, x.bytes[n][2 * Q + 8 * Half], x.bytes[n][2 * Q + 8 * Half + 1], start[n]);
}

/* sums = start + products of the lane's tile; start and sums may be the same array. */
template <int K, int NB>
__device__ __forceinline__ void add_tile(const uint32_t (&words)[K + 1], const PowersOfTwo& powers, const Activations<NB>& x,
                                         int32_t (&sums)[NB][4], const int32_t (&start)[NB][4]) {
  const States<K> states(words, powers);
  add_inputs<0, 0>(states, x, sums, start);
  add_inputs<0, 1>(states, x, sums, sums);
  add_inputs<1, 0>(states, x, sums, sums);
  add_inputs<1, 1>(states, x, sums, sums);
  add_inputs<2, 0>(states, x, sums, sums);
  add_inputs<2, 1>(states, x, sums, sums);
  add_inputs<3, 0>(states, x, sums, sums);
  add_inputs<3, 1>(states, x, sums, sums);
}

/* A lane's K words in shared memory, and the one before them. */
template <int K>
__device__ __forceinline__ void load_words(const uint32_t* own, uint32_t before, uint32_t (&words)[K + 1]) {
  words[0] = before;
  if constexpr (K == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(own);
    words[1] = two.x;
    words[2] = two.y;
  } else if constexpr (K == 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(own);
    words[1] = four.x;
    words[2] = four.y;
    words[3] = four.z;
    words[4] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < K; ++i) words[i + 1] = own[i];
  }
}

}  // namespace glm53

#endif /* GLM53_CUDA_INT_EXPERT_TILES_CUH_ */
