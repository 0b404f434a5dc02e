/* C functions over exllamav3's CPU expert kernel, compiled together with it by bench/stock_kernels.py. Public functions of its header only. */
#include <stdio.h>

#include <exception>
#include <vector>

#include "moe_mul1.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

char g_error[256];

at::Tensor view(const uint8_t* bytes, at::ScalarType type, std::vector<int64_t> sizes) { return {bytes, type, std::move(sizes)}; }

}  // namespace

API const char* stock_error() { return g_error; }

/* The best tier that the library uses on this host: 0 scalar, 1 AVX2, 2 AVX-512 BW, 3 VNNI, 4 VBMI. */
API int stock_tier() {
  if (exl3_moe_cpu_has_avx512_vbmi()) return 4;
  if (exl3_moe_cpu_has_avx512_vnni()) return 3;
  if (exl3_moe_cpu_has_avx512_bw()) return 2;
  return exl3_moe_cpu_has_avx2() ? 1 : 0;
}

/* A layer of `count` gated silu experts. offsets: bytes of gate, up, down trellis and gate suh, svh, up suh, svh, down suh, svh in a record.
 * Returns a handle, or -1. */
API int64_t stock_make_layer(const uint8_t* records, int64_t stride, int count, int hidden, int inter, int bits, const int64_t* offsets,
                             double act_limit, int swizzled) try {
  std::vector<at::Tensor> parts[9];
  const int in_out[3][2] = {{hidden, inter}, {hidden, inter}, {inter, hidden}};
  for (int e = 0; e < count; ++e) {
    const uint8_t* record = records + e * stride;
    for (int m = 0; m < 3; ++m) {
      const int64_t in = in_out[m][0], out = in_out[m][1];
      parts[3 * m].push_back(view(record + offsets[m], at::kShort, {in / 16, out / 16, 16 * bits}));
      parts[3 * m + 1].push_back(view(record + offsets[3 + 2 * m], at::kHalf, {in}));
      parts[3 * m + 2].push_back(view(record + offsets[4 + 2 * m], at::kHalf, {out}));
    }
  }
  return exl3_moe_cpu_make_layer(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], parts[7], parts[8], {}, {}, {}, 0,
                                 act_limit, swizzled);
} catch (const std::exception& error) {
  snprintf(g_error, sizeof g_error, "%s", error.what());
  return -1;
}

API void stock_free_layer(int64_t handle) { exl3_moe_cpu_free_layer(handle); }

/* x fp16 [rows][hidden], sel int32 [rows][topk], w fp16 [rows][topk] -> out fp32 [rows][hidden]. */
API int stock_forward(int64_t handle, const uint16_t* x, const int32_t* sel, const uint16_t* w, float* out, int rows, int topk,
                      int threads) try {
  exl3_moe_cpu_forward_raw(handle, reinterpret_cast<const at::Half*>(x), sel, reinterpret_cast<const at::Half*>(w), out, rows, topk, threads);
  return 0;
} catch (const std::exception& error) {
  snprintf(g_error, sizeof g_error, "%s", error.what());
  return -1;
}
