#include "cpu/variants.h"

#include <cpuid.h>
#include <stdio.h>

#include <memory>
#include <mutex>

#include "cpu/error.h"
#include "cpu/expert.h"
#include "cpu/numerics.h"
#include "cpu/self_test.h"
#include "moe_trace.h"

namespace glm53 {

namespace {

constexpr uint32_t kNumVariants = 6;
constexpr const char* kNames[kNumVariants] = {"auto", "scalar", "avx2", "avx512bw", "avx512vbmi", "avxvnni"};
/* What a variant needs, in words. */
constexpr const char* kNeeds[kNumVariants] = {
    "", "", "AVX2 with FMA and F16C", "AVX-512 F and BW", "AVX-512 F, BW, VNNI, VBMI and VBMI2", "AVX-VNNI"};

uint64_t saved_state() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

/* A process runs the self-test of a variant once. */
const SelfTest& self_test(uint32_t variant) {
  static std::once_flag once[kNumVariants];
  static SelfTest results[kNumVariants];
  std::call_once(once[variant], [variant] { results[variant] = run_self_test(*variant_ops(variant)); });
  return results[variant];
}

Choice same_for_all(uint32_t variant, const KernelOps* ops, bool automatic, std::string reason) {
  Choice choice = {variant, {}, automatic, std::move(reason)};
  for (const KernelOps*& one : choice.ops) one = ops;
  return choice;
}

std::string times_of(const SelfTest& test) {
  char times[96];
  snprintf(times, sizeof times, "%.0f us against scalar %.0f us", test.candidate_us[1], test.scalar_us);
  return times;
}

Choice requested_choice(uint32_t variant) {
  const SelfTest& test = self_test(variant);
  if (!test.same_bits) {
    return same_for_all(variant, nullptr, false,
                        std::string("the self-test of ") + kNames[variant] + " did not give the scalar kernel's bits");
  }
  return same_for_all(variant, variant_ops(variant), false, "requested; self-test: same bits as scalar, " + times_of(test));
}

/* "1-3 rows: avx512vbmi with 12 us at 1 (avx2 20, avx512bw 15)": the numbers of rows from `first` to `last` go to one variant. */
std::string describe_rows(uint32_t first, uint32_t last, uint32_t best, uint32_t eligible, const double (*us)[MOE_MAX_ROWS + 1]) {
  char text[96];
  snprintf(text, sizeof text, last > first ? "%u-%u rows: " : "%u rows: ", first, last);
  std::string all = text;
  snprintf(text, sizeof text, "%s with %.0f us at %u (", kNames[best], us[best][first], first);
  all += text;
  const char* between = "";
  for (uint32_t v = MOE_VARIANT_AVX2; v < kNumVariants; ++v) {
    if (v == best || !(eligible >> v & 1u)) continue;
    snprintf(text, sizeof text, "%s%s %.0f", between, kNames[v], us[v][first]);
    all += text;
    between = ", ";
  }
  return all + ")";
}

/* Takes the variant with the least time for each number of rows. */
Choice fastest(uint32_t eligible, const double (*us)[MOE_MAX_ROWS + 1], const std::string& start) {
  Choice choice = {MOE_VARIANT_SCALAR, {}, true, start};
  uint32_t taken[MOE_MAX_ROWS + 2] = {};
  for (uint32_t rows = 1; rows <= MOE_MAX_ROWS; ++rows) {
    taken[rows] = MOE_VARIANT_SCALAR;
    for (uint32_t v = MOE_VARIANT_AVX2; v < kNumVariants; ++v) {
      if ((eligible >> v & 1u) && us[v][rows] < us[taken[rows]][rows]) taken[rows] = v;
    }
    choice.ops[rows] = variant_ops(taken[rows]);
  }
  choice.ops[0] = choice.ops[1];
  choice.variant = taken[1];
  for (uint32_t first = 1; first <= MOE_MAX_ROWS;) {
    uint32_t last = first;
    while (last < MOE_MAX_ROWS && taken[last + 1] == taken[first]) ++last;
    choice.reason += (first > 1 ? ", " : "") + describe_rows(first, last, taken[first], eligible, us);
    first = last + 1;
  }
  return choice;
}

Choice automatic_choice(uint32_t features) {
  uint32_t eligible = 0;
  std::string refused;
  double us[kNumVariants][MOE_MAX_ROWS + 1] = {};
  for (double& time : us[MOE_VARIANT_SCALAR]) time = 1e30;
  uint32_t count = 0, only = 0;
  for (uint32_t v = MOE_VARIANT_AVX2; v < kNumVariants; ++v) {
    if (!(features >> v & 1u)) continue;
    const SelfTest& test = self_test(v);
    if (!test.same_bits) {
      refused += std::string("; ") + kNames[v] + " is left out: its self-test did not give the scalar kernel's bits";
      continue;
    }
    us[MOE_VARIANT_SCALAR][1] = test.scalar_us;
    for (uint32_t rows = 1; rows <= MOE_MAX_ROWS; ++rows) us[v][rows] = test.candidate_us[rows];
    eligible |= 1u << v;
    ++count;
    only = v;
  }
  if (count == 0) return same_for_all(MOE_VARIANT_SCALAR, &kScalarOps, true, "no vector variant gave the scalar kernel's bits" + refused);
  if (count == 1) {
    if (us[only][1] > us[MOE_VARIANT_SCALAR][1]) {
      return same_for_all(MOE_VARIANT_SCALAR, &kScalarOps, true,
                          std::string(kNames[only]) + " is slower here: " + times_of(self_test(only)));
    }
    return same_for_all(
        only, variant_ops(only), true,
        std::string("the host has ") + kNeeds[only] + "; self-test: same bits as scalar, " + times_of(self_test(only)) + refused);
  }
  Choice choice = fastest(eligible, us, "timed, all with the same bits as scalar: ");
  choice.reason += refused;
  return choice;
}

}  // namespace

uint32_t host_features() {
  uint32_t mask = 1u << MOE_VARIANT_SCALAR;
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return mask;
  const uint32_t wanted = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
  if ((ecx & wanted) != wanted) return mask;
  const uint64_t saved = saved_state();
  if ((saved & 6u) != 6u) return mask; /* the system saves xmm and ymm registers */
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & bit_AVX2)) return mask;
  mask |= 1u << MOE_VARIANT_AVX2;
  const uint32_t deepest = eax;
  const uint32_t base512 = bit_AVX512F | bit_AVX512BW;
  if ((saved & 0xE6u) == 0xE6u && (ebx & base512) == base512) { /* and the masks and zmm registers */
    mask |= 1u << MOE_VARIANT_AVX512BW;
    const uint32_t more = bit_AVX512VNNI | bit_AVX512VBMI | bit_AVX512VBMI2;
    if ((ecx & more) == more) mask |= 1u << MOE_VARIANT_AVX512VBMI;
  }
  if (deepest >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & bit_AVXVNNI)) mask |= 1u << MOE_VARIANT_AVXVNNI;
  return mask;
}

const KernelOps* variant_ops(uint32_t variant) {
  switch (variant) {
    case MOE_VARIANT_SCALAR:
      return &kScalarOps;
    case MOE_VARIANT_AVX2:
      return &kAvx2Ops;
    case MOE_VARIANT_AVX512BW:
      return &kAvx512BwOps;
    case MOE_VARIANT_AVX512VBMI:
      return &kAvx512VbmiOps;
    case MOE_VARIANT_AVXVNNI:
      return &kAvxVnniOps;
    default:
      return nullptr;
  }
}

Choice choose_variant(uint32_t requested, uint32_t features) {
  if (requested == MOE_VARIANT_SCALAR) return same_for_all(MOE_VARIANT_SCALAR, &kScalarOps, false, "requested");
  if (requested == MOE_VARIANT_AUTO) {
    if (features & 1u << MOE_VARIANT_AVX2) return automatic_choice(features);
    return same_for_all(MOE_VARIANT_SCALAR, &kScalarOps, true,
                        "this host has no AVX2 with FMA and F16C, or its system does not save their registers");
  }
  if (requested >= kNumVariants) return same_for_all(requested, nullptr, false, "variant " + std::to_string(requested) + " is not known");
  if (!(features >> requested & 1u)) {
    return same_for_all(requested, nullptr, false,
                        std::string("variant ") + kNames[requested] + " cannot run: this host has no " + kNeeds[requested]);
  }
  return requested_choice(requested);
}

void tune_choice(Choice& choice, const MoeExpertShape& shape) {
  if (!choice.automatic) return;
  const uint32_t features = host_features();
  uint32_t eligible = 0, count = 0;
  double us[kNumVariants][MOE_MAX_ROWS + 1] = {};
  for (double& time : us[MOE_VARIANT_SCALAR]) time = 1e30;
  for (uint32_t v = MOE_VARIANT_AVX2; v < kNumVariants; ++v) {
    if (!(features >> v & 1u) || !self_test(v).same_bits) continue;
    if (!time_shape(*variant_ops(v), shape, us[v])) return;
    eligible |= 1u << v;
    ++count;
  }
  if (count < 2) return; /* nothing to choose from */
  char start[96];
  snprintf(start, sizeof start, "timed on a band of %u inputs at %u bits, all with the same bits as scalar: ", shape.hidden, shape.k_up);
  choice = fastest(eligible, us, start);
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
  const auto scratch = std::make_unique<ThreadScratch>();
  Memory memory;
  const FloatStateGuard guard;
  if (!evaluate(*variant_ops(variant), memory, *scratch, *task, 0, task->num_rows, trace)) return fail("out of memory in moe_trace");
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
