/* The C++ reference of docs/arithmetic.md: plain loops in the order of the text. Every other variant is tested against its bits. */
#include <math.h>

#include "cpu/kernel_ops.h"
#include "cpu/numerics.h"
#include "cpu/trellis.h"
#include "moe_expert.h"

namespace {

using namespace glm53;

void quantise_block(const float* h, int16_t* q, float* scale, int32_t* sum) {
  uint32_t largest = 0; /* magnitudes compare as integers, and a NaN comes out above every number */
  for (uint32_t i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = float_bits(h[i]) & 0x7FFFFFFFu;
    if (magnitude > largest) largest = magnitude;
  }
  *sum = 0;
  if (largest < kSmallestBits || largest >= 0x7F800000u) {
    *scale = largest < kSmallestBits ? 0.0f : quiet_nan();
    for (uint32_t i = 0; i < kBlock; ++i) q[i] = 0;
    return;
  }
  const float m = bits_float(largest);
  *scale = m / kQuantMax;
  const float r = kQuantMax / m;
  for (uint32_t i = 0; i < kBlock; ++i) {
    float rounded = nearbyintf(h[i] * r);
    rounded = rounded > kQuantMax ? kQuantMax : rounded;
    rounded = rounded < -kQuantMax ? -kQuantMax : rounded;
    q[i] = static_cast<int16_t>(rounded);
    *sum += q[i];
  }
}

void prepare_block(const void* x, uint32_t x_dtype, const uint16_t* suh, int16_t* q, float* scale, int32_t* sum, const BlockTrace* trace) {
  float v[kBlock];
  for (uint32_t i = 0; i < kBlock; ++i) {
    const float value = x_dtype == MOE_DTYPE_F16 ? half_to_float(static_cast<const uint16_t*>(x)[i]) : static_cast<const float*>(x)[i];
    v[i] = value * half_to_float(suh[i]);
  }
  if (trace != nullptr) memcpy(trace->v, v, sizeof v);
  hadamard128(v);
  if (trace != nullptr) memcpy(trace->h, v, sizeof v);
  quantise_block(v, q, scale, sum);
}

/* The states of tile (kt, tile_column), whatever the layout. */
void states_of(const BandArgs& args, uint32_t kt, uint32_t tile_column, uint16_t* states) {
  if (args.layout == MOE_LAYOUT_NATIVE) {
    return tile_states(args.trellis + (static_cast<size_t>(kt) * args.out_tiles + tile_column) * tile_halfwords(args.k), args.k, states);
  }
  uint16_t tile[16 * kMaxBits];
  native_tile(args.trellis + planar_tile(kt, tile_column, args.in_blocks) * tile_halfwords(args.k), args.k, tile);
  tile_states(tile, args.k, states);
}

/* z of one tile column (16 outputs) gains block b: integer sums, one conversion. */
void add_block_mul1(const BandArgs& args, uint32_t tile_column, uint32_t b, float (*z)[16]) {
  int32_t sums[MOE_MAX_ROWS][16] = {};
  for (uint32_t kt = b * kBlockTiles; kt < (b + 1) * kBlockTiles; ++kt) {
    uint16_t states[kTileWeights];
    states_of(args, kt, tile_column, states);
    for (uint32_t r = 0; r < 16; ++r) {
      int32_t weights[16];
      for (uint32_t c = 0; c < 16; ++c) weights[c] = mul1_byte_sum(states[tile_position(r, c)]) - 510;
      for (uint32_t m = 0; m < args.rows; ++m) {
        const int32_t q = args.q[m * args.in_blocks * kBlock + kt * 16u + r];
        for (uint32_t c = 0; c < 16; ++c) sums[m][c] += weights[c] * q;
      }
    }
  }
  for (uint32_t m = 0; m < args.rows; ++m) {
    const float constant = -238.0f * static_cast<float>(args.sum[m * args.in_blocks + b]);
    const float scale = args.scale[m * args.in_blocks + b] * kTwoPow17Inv;
    for (uint32_t c = 0; c < 16; ++c) {
      const float t = fmaf(887.0f, static_cast<float>(sums[m][c]), constant);
      z[m][c] = fmaf(t, scale, z[m][c]);
    }
  }
}

/* The same for the codebooks that are not affine in an integer: fp32 sums over ascending inputs. */
void add_block_float(const BandArgs& args, uint32_t tile_column, uint32_t b, float (*z)[16]) {
  float sums[MOE_MAX_ROWS][16] = {};
  for (uint32_t kt = b * kBlockTiles; kt < (b + 1) * kBlockTiles; ++kt) {
    uint16_t states[kTileWeights];
    states_of(args, kt, tile_column, states);
    for (uint32_t r = 0; r < 16; ++r) {
      float weights[16];
      for (uint32_t c = 0; c < 16; ++c) weights[c] = half_to_float(state_weight(states[tile_position(r, c)], args.codebook));
      for (uint32_t m = 0; m < args.rows; ++m) {
        const float q = args.q[m * args.in_blocks * kBlock + kt * 16u + r];
        for (uint32_t c = 0; c < 16; ++c) sums[m][c] = fmaf(weights[c], q, sums[m][c]);
      }
    }
  }
  for (uint32_t m = 0; m < args.rows; ++m) {
    const float scale = args.scale[m * args.in_blocks + b];
    for (uint32_t c = 0; c < 16; ++c) z[m][c] = fmaf(sums[m][c], scale, z[m][c]);
  }
}

void band(const BandArgs& args) {
  const uint32_t length = group_blocks(args.in_blocks);
  const uint32_t end = args.end_group * length < args.in_blocks ? args.end_group * length : args.in_blocks;
  for (uint32_t tile = 0; tile < kBlockTiles; ++tile) {
    float groups[kGroups][MOE_MAX_ROWS][16] = {};
    for (uint32_t b = args.first_group * length; b < end; ++b) {
      if (args.codebook == MOE_CODEBOOK_MUL1) {
        add_block_mul1(args, args.band * kBlockTiles + tile, b, groups[b / length]);
      } else {
        add_block_float(args, args.band * kBlockTiles + tile, b, groups[b / length]);
      }
    }
    for (uint32_t g = args.first_group; g < args.end_group; ++g) {
      for (uint32_t m = 0; m < args.rows; ++m) {
        memcpy(args.groups + (static_cast<size_t>(g) * args.rows + m) * kBlock + tile * 16u, groups[g][m], sizeof groups[g][m]);
      }
    }
  }
}

void finish_block(const float* z, const uint16_t* svh, const uint16_t* bias, float* out) {
  float values[kBlock];
  memcpy(values, z, sizeof values);
  hadamard128(values);
  for (uint32_t i = 0; i < kBlock; ++i) {
    out[i] = values[i] * half_to_float(svh[i]);
    if (bias != nullptr) out[i] += half_to_float(bias[i]);
  }
}

float activate(uint32_t activation, float limit, float g) {
  if (activation == MOE_ACT_SWIGLU_OAI) {
    if (limit != 0.0f) g = at_most(g, limit);
    return g * sigmoid_(g * kOaiSlope);
  }
  const float value = activation == MOE_ACT_SILU ? silu_(g) : activation == MOE_ACT_GELU ? gelu_(g) : relu2_(g);
  return limit != 0.0f ? at_most(value, limit) : value;
}

void activate_block(uint32_t activation, float limit, const float* g, const float* u, float* a) {
  for (uint32_t i = 0; i < kBlock; ++i) {
    if (g == nullptr) {
      a[i] = activate(activation, limit, u[i]);
      continue;
    }
    float up = u[i];
    if (limit != 0.0f) up = at_least(at_most(up, limit), -limit);
    if (activation == MOE_ACT_SWIGLU_OAI) up += 1.0f;
    a[i] = activate(activation, limit, g[i]) * up;
  }
}

}  // namespace

const glm53::KernelOps glm53::kScalarOps = {prepare_block, band, finish_block, activate_block};
