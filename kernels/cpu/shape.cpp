/* The record of one expert: offsets of its parts, and the checks that a shape passes before a kernel believes it. */
#include "cpu/shape.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include <initializer_list>
#include <string>

#include "cpu/error.h"
#include "cpu/numerics.h"
#include "cpu/trellis.h"

namespace {

using namespace glm53;

constexpr uint64_t kPage = 4096;

uint64_t trellis_bytes(uint32_t in_features, uint32_t out_features, uint32_t k) { return uint64_t{in_features} * out_features / 8u * k; }

int check_dims(const MoeExpertShape& s) {
  if (s.hidden == 0 || s.hidden % kBlock != 0) return fail("hidden = %u is not a positive multiple of 128", s.hidden);
  if (s.inter == 0 || s.inter % kBlock != 0) return fail("inter = %u is not a positive multiple of 128", s.inter);
  if (!is_gateless(s) && (s.k_gate < 1 || s.k_gate > kMaxBits))
    return fail("k_gate = %u bits per weight is not supported (1..8)", s.k_gate);
  if (s.k_up < 1 || s.k_up > kMaxBits) return fail("k_up = %u bits per weight is not supported (1..8)", s.k_up);
  if (s.k_down < 1 || s.k_down > kMaxBits) return fail("k_down = %u bits per weight is not supported (1..8)", s.k_down);
  if (s.codebook > MOE_CODEBOOK_MUL1) return fail("codebook %u is not known (0 = 3INST, 1 = MCG, 2 = MUL1)", s.codebook);
  if (s.activation > MOE_ACT_RELU2) return fail("activation %u is not known (0 = silu, 1 = gelu, 2 = swiglu_oai, 3 = relu2)", s.activation);
  if (s.layout > MOE_LAYOUT_PLANAR) return fail("layout %u is not known (0 = native, 1 = planar)", s.layout);
  if (s.layout == MOE_LAYOUT_PLANAR && s.codebook != MOE_CODEBOOK_MUL1) return fail("layout planar needs the codebook MUL1");
  if (is_gateless(s) && s.activation == MOE_ACT_SWIGLU_OAI) return fail("activation swiglu_oai needs a gate matrix");
  if (!(s.act_limit >= 0.0f) || isinf(s.act_limit))
    return fail("act_limit = %g is not a finite number >= 0", static_cast<double>(s.act_limit));
  return 0;
}

int check_part(const MoeExpertShape& s, const char* name, uint32_t offset, uint64_t bytes) {
  if (offset % 64u != 0 || offset + bytes > s.record_bytes) {
    return fail("%s: %llu bytes at offset %u are not 64-byte aligned inside a record of %u bytes", name,
                static_cast<unsigned long long>(bytes), offset, s.record_bytes);
  }
  return 0;
}

int check_linear_parts(const MoeExpertShape& s, const LinearParts& linear) {
  if (check_part(s, linear.name, linear.trellis, trellis_bytes(linear.in_features, linear.out_features, linear.k)) != 0) return -1;
  if (check_part(s, linear.name, linear.suh, uint64_t{linear.in_features} * 2u) != 0) return -1;
  if (check_part(s, linear.name, linear.svh, uint64_t{linear.out_features} * 2u) != 0) return -1;
  if (linear.bias == MOE_ABSENT) return 0;
  return check_part(s, linear.name, linear.bias, uint64_t{linear.out_features} * 2u);
}

/* Hands out offsets in ascending order. */
class Cursor {
 public:
  uint32_t take(uint64_t bytes) {
    const uint64_t at = next_;
    next_ += bytes;
    return static_cast<uint32_t>(at);
  }
  uint64_t used() const { return next_; }

 private:
  uint64_t next_ = 0;
};

struct Field {
  const char* name;
  size_t offset, size;
};
#define FIELD(type, name) \
  Field { #type "." #name, offsetof(type, name), sizeof(type::name) }

constexpr Field kLayout[] = {
    FIELD(MoeExpertShape, hidden),
    FIELD(MoeExpertShape, inter),
    FIELD(MoeExpertShape, record_bytes),
    FIELD(MoeExpertShape, k_gate),
    FIELD(MoeExpertShape, k_up),
    FIELD(MoeExpertShape, k_down),
    FIELD(MoeExpertShape, codebook),
    FIELD(MoeExpertShape, activation),
    FIELD(MoeExpertShape, layout),
    FIELD(MoeExpertShape, reserved),
    FIELD(MoeExpertShape, act_limit),
    FIELD(MoeExpertShape, gate_trellis),
    FIELD(MoeExpertShape, up_trellis),
    FIELD(MoeExpertShape, down_trellis),
    FIELD(MoeExpertShape, gate_suh),
    FIELD(MoeExpertShape, gate_svh),
    FIELD(MoeExpertShape, up_suh),
    FIELD(MoeExpertShape, up_svh),
    FIELD(MoeExpertShape, down_suh),
    FIELD(MoeExpertShape, down_svh),
    FIELD(MoeExpertShape, gate_bias),
    FIELD(MoeExpertShape, up_bias),
    FIELD(MoeExpertShape, down_bias),
    Field{"MoeExpertShape.", 0, sizeof(MoeExpertShape)},
    FIELD(MoeTask, shape),
    FIELD(MoeTask, record),
    FIELD(MoeTask, x),
    FIELD(MoeTask, x_rows),
    FIELD(MoeTask, out),
    FIELD(MoeTask, out_rows),
    FIELD(MoeTask, num_rows),
    FIELD(MoeTask, x_dtype),
    Field{"MoeTask.", 0, sizeof(MoeTask)},
};
#undef FIELD

std::string describe_layout() {
  std::string text;
  for (const Field& field : kLayout) {
    text += std::string(field.name) + "=" + std::to_string(field.offset) + ":" + std::to_string(field.size) + "\n";
  }
  return text;
}

}  // namespace

namespace glm53 {

LinearParts gate_parts(const MoeExpertShape& s) {
  return {"gate", s.hidden, s.inter, s.k_gate, s.gate_trellis, s.gate_suh, s.gate_svh, s.gate_bias};
}
LinearParts up_parts(const MoeExpertShape& s) { return {"up", s.hidden, s.inter, s.k_up, s.up_trellis, s.up_suh, s.up_svh, s.up_bias}; }
LinearParts down_parts(const MoeExpertShape& s) {
  return {"down", s.inter, s.hidden, s.k_down, s.down_trellis, s.down_suh, s.down_svh, s.down_bias};
}

int check_shape(const MoeExpertShape& s) {
  if (check_dims(s) != 0) return -1;
  if (s.record_bytes == 0 || s.record_bytes % kPage != 0)
    return fail("record_bytes = %u is not a positive multiple of 4096", s.record_bytes);
  if (!is_gateless(s) && check_linear_parts(s, gate_parts(s)) != 0) return -1;
  if (check_linear_parts(s, up_parts(s)) != 0) return -1;
  return check_linear_parts(s, down_parts(s));
}

}  // namespace glm53

extern "C" int moe_shape_init(MoeExpertShape* shape, uint32_t hidden, uint32_t inter, uint32_t k_gate, uint32_t k_up, uint32_t k_down,
                              uint32_t codebook, uint32_t activation, float act_limit, uint32_t gateless, uint32_t has_bias) {
  if (shape == nullptr) return fail("shape must not be NULL");
  for (const uint32_t small : {k_gate, k_up, k_down, codebook, activation}) {
    if (small > 255u) return fail("a bit count, codebook or activation of %u is not supported", small);
  }
  MoeExpertShape s;
  memset(&s, 0, sizeof s);
  s.hidden = hidden;
  s.inter = inter;
  s.k_gate = static_cast<uint8_t>(gateless ? 0 : k_gate);
  s.k_up = static_cast<uint8_t>(k_up);
  s.k_down = static_cast<uint8_t>(k_down);
  s.codebook = static_cast<uint8_t>(codebook);
  s.activation = static_cast<uint8_t>(activation);
  s.act_limit = act_limit;
  s.gate_trellis = gateless ? MOE_ABSENT : 0;
  if (check_dims(s) != 0) return -1;

  const uint64_t hidden_bytes = uint64_t{hidden} * 2u;
  const uint64_t inter_bytes = uint64_t{inter} * 2u;
  Cursor cursor;
  s.gate_trellis = gateless ? MOE_ABSENT : cursor.take(trellis_bytes(hidden, inter, k_gate));
  s.up_trellis = cursor.take(trellis_bytes(hidden, inter, k_up));
  s.down_trellis = cursor.take(trellis_bytes(inter, hidden, k_down));
  s.gate_suh = gateless ? MOE_ABSENT : cursor.take(hidden_bytes);
  s.gate_svh = gateless ? MOE_ABSENT : cursor.take(inter_bytes);
  s.up_suh = cursor.take(hidden_bytes);
  s.up_svh = cursor.take(inter_bytes);
  s.down_suh = cursor.take(inter_bytes);
  s.down_svh = cursor.take(hidden_bytes);
  s.gate_bias = gateless || !has_bias ? MOE_ABSENT : cursor.take(inter_bytes);
  s.up_bias = has_bias ? cursor.take(inter_bytes) : MOE_ABSENT;
  s.down_bias = has_bias ? cursor.take(hidden_bytes) : MOE_ABSENT;
  const uint64_t record_bytes = (cursor.used() + kPage - 1) / kPage * kPage;
  if (record_bytes > 0xFFFFF000u) return fail("an expert of %u x %u does not fit a record (4 GiB)", hidden, inter);
  s.record_bytes = static_cast<uint32_t>(record_bytes);
  *shape = s;
  return 0;
}

extern "C" int moe_shape_check(const MoeExpertShape* shape) {
  if (shape == nullptr) return fail("shape must not be NULL");
  return check_shape(*shape);
}

extern "C" int moe_shape_planar(MoeExpertShape* planar, const MoeExpertShape* native) {
  if (planar == nullptr || native == nullptr) return fail("planar and native must not be NULL");
  MoeExpertShape s = *native;
  s.layout = MOE_LAYOUT_PLANAR;
  if (check_shape(s) != 0) return -1;
  *planar = s;
  return 0;
}

extern "C" int moe_repack_planar(const MoeExpertShape* native, const void* record, void* planar_record) {
  if (native == nullptr || record == nullptr || planar_record == nullptr) return fail("native, record and planar_record must not be NULL");
  MoeExpertShape planar;
  if (moe_shape_planar(&planar, native) != 0) return -1;
  if (native->layout != MOE_LAYOUT_NATIVE) return fail("layout %u of the record is not native", native->layout);
  memcpy(planar_record, record, native->record_bytes);
  const LinearParts parts[] = {gate_parts(*native), up_parts(*native), down_parts(*native)};
  for (const LinearParts& linear : parts) {
    if (linear.trellis == MOE_ABSENT) continue;
    const uint16_t* from = reinterpret_cast<const uint16_t*>(static_cast<const char*>(record) + linear.trellis);
    uint16_t* to = reinterpret_cast<uint16_t*>(static_cast<char*>(planar_record) + linear.trellis);
    const uint32_t tiles_in = linear.in_features / 16u, tiles_out = linear.out_features / 16u, step = tile_halfwords(linear.k);
    for (uint32_t kt = 0; kt < tiles_in; ++kt) {
      for (uint32_t nt = 0; nt < tiles_out; ++nt) {
        planar_from_native(from + (size_t{kt} * tiles_out + nt) * step, linear.k,
                           to + planar_tile(kt, nt, linear.in_features / kBlock) * step);
      }
    }
  }
  return 0;
}

extern "C" const char* moe_struct_layout(void) {
  static const std::string layout = describe_layout();
  return layout.c_str();
}

extern "C" uint32_t moe_arithmetic_version(void) { return MOE_ARITHMETIC_VERSION; }
