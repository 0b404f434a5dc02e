/* fp16 as exllamav3's CPU expert kernel uses it: bits that convert to and from float. */
#ifndef GLM53_BENCH_STOCK_HALF_H_
#define GLM53_BENCH_STOCK_HALF_H_

#include <stdint.h>

namespace c10 {

struct Half {
  struct from_bits_t {};
  static constexpr from_bits_t from_bits() { return {}; }

  Half() = default;
  constexpr Half(uint16_t bits, from_bits_t) : x(bits) {}
  Half(float value) { /* NOLINT: implicit, as in PyTorch */
    const _Float16 half = static_cast<_Float16>(value);
    __builtin_memcpy(&x, &half, sizeof x);
  }
  operator float() const {
    _Float16 half;
    __builtin_memcpy(&half, &x, sizeof half);
    return static_cast<float>(half);
  }

  uint16_t x;
};

}  // namespace c10

#endif /* GLM53_BENCH_STOCK_HALF_H_ */
