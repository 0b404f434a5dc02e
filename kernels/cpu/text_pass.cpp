#include "include/text_pass.h"

namespace {

constexpr int kNoSuchOp = -2;

// Arguments of a call, read one after the other as the function's parameters have them.
class Args {
 public:
  explicit Args(const TextCall& call) : args_(call.args) {}

  template <typename T>
  T* ptr(int i) const {
    return static_cast<T*>(args_[i].pointer);
  }
  int64_t num(int i) const { return args_[i].integer; }
  float real(int i) const { return args_[i].number; }

 private:
  const TextArg* args_;
};

void run_kda(const Args& a, const TextRows& rows) {
  const int64_t first = a.num(9) * rows.num_segments;
  text_kda(a.ptr<const TextKda>(0), a.ptr<float>(1), a.num(2), a.ptr<float>(3), a.num(4), a.ptr<float>(5), a.num(6), a.ptr<float>(7),
           a.num(8), rows.seg_tokens, rows.num_segments, rows.conv_state + first, rows.recurrent + first, a.ptr<float>(10));
}

void run_mla(const Args& a, const TextRows& rows) {
  float* const* latents = rows.latents + a.num(6) * rows.num_segments;
  text_mla(a.num(0), a.num(1), a.real(2), a.ptr<float>(3), a.ptr<float>(4), a.num(5), rows.seg_tokens, rows.seg_past, rows.num_segments,
           latents, a.ptr<float>(7));
}

int run_experts(const Args& a, const TextRows& rows, TextExperts experts, void* context) {
  return experts(context, static_cast<uint32_t>(a.num(0)), static_cast<uint32_t>(rows.tokens), static_cast<uint32_t>(a.num(1)),
                 a.ptr<float>(2), a.ptr<int64_t>(3), a.ptr<float>(4), rows.prefill, a.ptr<float>(5));
}

void run_logits(const Args& a, const TextRows& rows) {
  const int64_t num_streams = a.num(1);
  const int64_t hidden = a.num(2);
  const int64_t count = rows.all_rows != 0 ? rows.tokens : rows.num_segments;
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    last += rows.all_rows != 0 ? 1 : rows.seg_tokens[i];
    text_hyper_head(a.ptr<float>(0) + last * num_streams * hidden, num_streams, hidden, a.ptr<float>(3), a.real(4),
                    a.ptr<float>(5) + i * hidden, 1);
  }
  text_linear(a.ptr<float>(5), hidden, a.ptr<float>(6), a.num(7), a.num(8), rows.logits, a.num(8), count);
}

int run(const TextCall& call, const TextRows& rows, TextExperts experts, void* context) {
  const Args a(call);
  switch (call.op) {
    case TEXT_OP_LINEAR:
      text_linear(a.ptr<float>(0), a.num(1), a.ptr<float>(2), a.num(3), a.num(4), a.ptr<float>(5), a.num(6), rows.tokens);
      return 0;
    case TEXT_OP_RMS_NORM:
      text_rms_norm(a.ptr<float>(0), a.num(1), a.ptr<float>(2), a.real(3), a.num(4), a.ptr<float>(5), a.num(6), rows.tokens);
      return 0;
    case TEXT_OP_HYPER_MIX:
      text_hyper_mix(a.ptr<TextHyperSite>(0), a.ptr<float>(1), rows.tokens, a.ptr<float>(2), a.ptr<float>(3), a.ptr<float>(4));
      return 0;
    case TEXT_OP_HYPER_APPLY:
      text_hyper_apply(a.num(0), a.num(1), a.ptr<float>(2), a.ptr<float>(3), a.ptr<float>(4), a.ptr<float>(5), a.ptr<float>(6),
                       rows.tokens);
      return 0;
    case TEXT_OP_KDA:
      run_kda(a, rows);
      return 0;
    case TEXT_OP_MLA:
      run_mla(a, rows);
      return 0;
    case TEXT_OP_ROUTE:
      text_route(a.ptr<float>(0), a.ptr<float>(1), a.ptr<float>(2), a.num(3), a.num(4), a.num(5), a.real(6), static_cast<int32_t>(a.num(7)),
                 rows.tokens, a.ptr<int64_t>(8), a.ptr<float>(9));
      return 0;
    case TEXT_OP_SWIGLU:
      text_swiglu(a.ptr<float>(0), a.num(1), a.real(2), a.ptr<float>(3), rows.tokens);
      return 0;
    case TEXT_OP_EXPERTS:
      return run_experts(a, rows, experts, context);
    case TEXT_OP_LOGITS:
      run_logits(a, rows);
      return 0;
    default:
      return kNoSuchOp;
  }
}

}  // namespace

int text_run(const TextCall* calls, int64_t num_calls, const TextRows* rows, TextExperts experts, void* context, int64_t* progress) {
  for (int64_t i = 0; i < num_calls; ++i) {
    const int code = run(calls[i], *rows, experts, context);
    if (code != 0) return code;
    __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
  }
  return 0;
}
