/* EXL3 -> dense fp32, for the linears that are not routed experts and for tests. Plain loops: it runs once, at load. */
#include <vector>

#include "cpu/error.h"
#include "cpu/numerics.h"
#include "cpu/trellis.h"
#include "moe_expert.h"

namespace {

using namespace glm53;

int check_linear(const void* trellis, uint32_t in_features, uint32_t out_features, uint32_t k, uint32_t codebook, const void* out) {
  if (trellis == nullptr || out == nullptr) return fail("trellis and out must not be NULL");
  if (in_features == 0 || in_features % 16u != 0) return fail("in_features = %u is not a positive multiple of 16", in_features);
  if (out_features == 0 || out_features % 16u != 0) return fail("out_features = %u is not a positive multiple of 16", out_features);
  if (k < 1 || k > kMaxBits) return fail("k = %u bits per weight is not supported (1..8)", k);
  if (codebook > MOE_CODEBOOK_MUL1) return fail("codebook %u is not known (0 = 3INST, 1 = MCG, 2 = MUL1)", codebook);
  return 0;
}

/* fp32 value of every state: 65,536 look-ups are cheaper to make than the weights of one mid-sized matrix. */
std::vector<float> weight_table(uint32_t codebook) {
  std::vector<float> table(65536);
  for (uint32_t state = 0; state < 65536u; ++state) {
    table[state] = half_to_float(state_weight(static_cast<uint16_t>(state), codebook));
  }
  return table;
}

void decode(const uint16_t* trellis, uint32_t in_features, uint32_t out_features, uint32_t k, uint32_t codebook, float* out) {
  const std::vector<float> table = weight_table(codebook);
  const uint32_t out_tiles = out_features / 16u;
  uint16_t states[kTileWeights];
  for (uint32_t kt = 0; kt < in_features / 16u; ++kt) {
    for (uint32_t nt = 0; nt < out_tiles; ++nt) {
      tile_states(trellis + (static_cast<size_t>(kt) * out_tiles + nt) * tile_halfwords(k), k, states);
      for (uint32_t r = 0; r < 16; ++r) {
        float* row = out + static_cast<size_t>(kt * 16u + r) * out_features + nt * 16u;
        for (uint32_t c = 0; c < 16; ++c) row[c] = table[states[tile_position(r, c)]];
      }
    }
  }
}

/* H128 along the inputs, then suh: both act on whole rows, so every column gets the same operations in the same order. */
void transform_inputs(float* weights, const uint16_t* suh, uint32_t in_features, size_t width) {
  for (uint32_t block = 0; block < in_features; block += kBlock) {
    float* rows = weights + block * width;
    for (uint32_t stride = 1; stride < kBlock; stride *= 2) {
      for (uint32_t i = 0; i < kBlock; ++i) {
        if (i & stride) continue;
        float* upper = rows + i * width;
        float* lower = upper + stride * width;
        for (size_t c = 0; c < width; ++c) {
          const float a = upper[c];
          const float b = lower[c];
          upper[c] = a + b;
          lower[c] = a - b;
        }
      }
    }
    for (uint32_t i = 0; i < kBlock; ++i) {
      const float scale = half_to_float(suh[block + i]);
      float* row = rows + i * width;
      for (size_t c = 0; c < width; ++c) row[c] = row[c] * kInvSqrt128 * scale;
    }
  }
}

void transform_outputs(float* weights, const uint16_t* svh, uint32_t in_features, size_t width) {
  std::vector<float> scales(width);
  for (size_t c = 0; c < width; ++c) scales[c] = half_to_float(svh[c]);
  for (uint32_t row = 0; row < in_features; ++row) {
    float* values = weights + row * width;
    for (size_t block = 0; block < width; block += kBlock) {
      hadamard128(values + block);
      for (uint32_t i = 0; i < kBlock; ++i) values[block + i] *= scales[block + i];
    }
  }
}

}  // namespace

extern "C" int exl3_decode(const uint16_t* trellis, uint32_t in_features, uint32_t out_features, uint32_t k, uint32_t codebook,
                           float* out) try {
  if (check_linear(trellis, in_features, out_features, k, codebook, out) != 0) return -1;
  const FloatStateGuard guard;
  decode(trellis, in_features, out_features, k, codebook, out);
  return 0;
} catch (const std::bad_alloc&) {
  return fail("out of memory in exl3_decode");
}

extern "C" int exl3_dequantize(const uint16_t* trellis, const uint16_t* suh, const uint16_t* svh, uint32_t in_features,
                               uint32_t out_features, uint32_t k, uint32_t codebook, float* out) try {
  if (check_linear(trellis, in_features, out_features, k, codebook, out) != 0) return -1;
  if (suh == nullptr || svh == nullptr) return fail("suh and svh must not be NULL");
  if (in_features % kBlock != 0) return fail("in_features = %u is not a multiple of 128", in_features);
  if (out_features % kBlock != 0) return fail("out_features = %u is not a multiple of 128", out_features);
  const FloatStateGuard guard;
  decode(trellis, in_features, out_features, k, codebook, out);
  transform_inputs(out, suh, in_features, out_features);
  transform_outputs(out, svh, in_features, out_features);
  return 0;
} catch (const std::bad_alloc&) {
  return fail("out of memory in exl3_dequantize");
}
