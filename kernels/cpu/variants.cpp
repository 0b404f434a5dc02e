#include "cpu/variants.h"

#include <cpuid.h>
#include <stdio.h>

#include "cpu/error.h"
#include "cpu/expert.h"
#include "cpu/numerics.h"
#include "cpu/self_test.h"
#include "moe_trace.h"

namespace glm53 {

namespace {

constexpr uint32_t kNumVariants = 6;
constexpr const char* kNames[kNumVariants] = {"auto", "scalar", "avx2", "avx512bw", "avx512vbmi", "avxvnni"};

uint64_t saved_state() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

/* A self-test takes nearly 0.1 s, so a process runs one. */
const SelfTest& avx2_self_test() {
  static const SelfTest result = run_self_test(kAvx2Ops);
  return result;
}

Choice scalar_choice(std::string reason) { return {MOE_VARIANT_SCALAR, &kScalarOps, std::move(reason)}; }

Choice choose_avx2(bool requested) {
  const SelfTest& test = avx2_self_test();
  char times[96];
  snprintf(times, sizeof times, "%.0f us against scalar %.0f us", test.candidate_us, test.scalar_us);
  if (!test.same_bits) {
    const std::string reason = "the self-test of avx2 did not give the scalar kernel's bits";
    return requested ? Choice{MOE_VARIANT_AVX2, nullptr, reason} : scalar_choice(reason);
  }
  if (requested) return {MOE_VARIANT_AVX2, &kAvx2Ops, std::string("requested; self-test: same bits as scalar, ") + times};
  if (test.candidate_us > test.scalar_us) return scalar_choice(std::string("avx2 is slower here: ") + times);
  return {MOE_VARIANT_AVX2, &kAvx2Ops, std::string("the host has AVX2, FMA and F16C; self-test: same bits as scalar, ") + times};
}

}  // namespace

uint32_t host_features() {
  uint32_t mask = 1u << MOE_VARIANT_SCALAR;
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return mask;
  const uint32_t wanted = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
  if ((ecx & wanted) != wanted) return mask;
  if ((saved_state() & 6u) != 6u) return mask; /* the system saves xmm and ymm registers */
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & bit_AVX2)) return mask;
  return mask | 1u << MOE_VARIANT_AVX2;
}

const KernelOps* variant_ops(uint32_t variant) {
  if (variant == MOE_VARIANT_SCALAR) return &kScalarOps;
  return variant == MOE_VARIANT_AVX2 ? &kAvx2Ops : nullptr;
}

Choice choose_variant(uint32_t requested, uint32_t features) {
  const bool has_avx2 = features & 1u << MOE_VARIANT_AVX2;
  if (requested == MOE_VARIANT_SCALAR) return scalar_choice("requested");
  if (requested == MOE_VARIANT_AUTO) {
    return has_avx2 ? choose_avx2(false)
                    : scalar_choice("this host has no AVX2 with FMA and F16C, or its system does not save their registers");
  }
  if (requested >= kNumVariants) return {requested, nullptr, "variant " + std::to_string(requested) + " is not known"};
  if (variant_ops(requested) == nullptr) return {requested, nullptr, std::string("variant ") + kNames[requested] + " is not built"};
  if (!has_avx2)
    return {requested, nullptr, std::string("variant ") + kNames[requested] + " cannot run: this host has no AVX2 with FMA and F16C"};
  return choose_avx2(true);
}

}  // namespace glm53

using namespace glm53;

extern "C" int moe_variant_available(uint32_t variant) {
  if (variant == MOE_VARIANT_AUTO) return 1;
  return variant < kNumVariants && variant_ops(variant) != nullptr && (host_features() >> variant & 1u);
}

extern "C" const char* moe_variant_name(uint32_t variant) { return variant < kNumVariants ? kNames[variant] : "unknown"; }

extern "C" uint32_t moe_explain_choice(uint32_t features, char* reason, size_t reason_size) {
  const Choice choice = choose_variant(MOE_VARIANT_AUTO, features & host_features());
  snprintf(reason, reason_size, "%s", choice.reason.c_str());
  return choice.variant;
}

extern "C" int moe_trace(uint32_t variant, const MoeTask* task, const MoeTrace* trace) {
  if (task == nullptr || trace == nullptr) return fail("task and trace must not be NULL");
  if (variant == MOE_VARIANT_AUTO || !moe_variant_available(variant))
    return fail("variant %s is not available here", moe_variant_name(variant));
  if (task->num_rows < 1 || task->num_rows > MOE_MAX_ROWS) return fail("num_rows = %u is not in 1..8", task->num_rows);
  if (check_task(*task) != 0) return -1;
  Workspace workspace;
  if (!workspace.reserve(*task->shape)) return fail("out of memory in moe_trace");
  const FloatStateGuard guard;
  evaluate(*variant_ops(variant), workspace, *task, 0, task->num_rows, trace);
  return 0;
}

extern "C" void moe_exp(const float* x, float* y, size_t count) {
  const FloatStateGuard guard;
  for (size_t i = 0; i < count; ++i) y[i] = exp_(x[i]);
}

extern "C" int moe_activate(uint32_t variant, uint32_t activation, float limit, const float* g, const float* u, float* a, size_t count) {
  if (variant == MOE_VARIANT_AUTO || !moe_variant_available(variant))
    return fail("variant %s is not available here", moe_variant_name(variant));
  if (count % kBlock != 0) return fail("count is not a multiple of 128");
  const FloatStateGuard guard;
  for (size_t i = 0; i < count; i += kBlock) {
    variant_ops(variant)->activate_block(activation, limit, g != nullptr ? g + i : nullptr, u + i, a + i);
  }
  return 0;
}
