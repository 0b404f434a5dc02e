/* The functions of text_ops.h as one table per instruction set; text_ops.cpp picks one at load. */
#ifndef GLM53_TEXT_OPS_TABLE_H_
#define GLM53_TEXT_OPS_TABLE_H_

#include "include/text_ops.h"

struct TextOps {
  decltype(&text_linear) linear;
  decltype(&text_rms_norm) rms_norm;
  decltype(&text_hyper_mix) hyper_mix;
  decltype(&text_hyper_apply) hyper_apply;
  decltype(&text_kda) kda;
  decltype(&text_mla) mla;
  decltype(&text_route) route;
  decltype(&text_swiglu) swiglu;
  decltype(&text_hyper_head) hyper_head;
};

namespace text_base {
extern const TextOps kOps;
}
namespace text_avx2 {
extern const TextOps kOps;
}

#endif
