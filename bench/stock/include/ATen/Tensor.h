/* The little of PyTorch's tensor that exllamav3's CPU expert kernel touches, so that the benchmark can compile that kernel from its wheel on
 * a machine without PyTorch. A tensor here is a view of memory that the benchmark owns. */
#ifndef GLM53_BENCH_STOCK_TENSOR_H_
#define GLM53_BENCH_STOCK_TENSOR_H_

#include <c10/util/Half.h>
#include <stdint.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace at {

using Half = c10::Half;
enum ScalarType { kHalf, kFloat, kLong, kInt, kShort };

struct Device {
  bool is_cpu() const { return true; }
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(const void* data, ScalarType type, std::vector<int64_t> sizes)
      : data_(const_cast<void*>(data)), type_(type), sizes_(std::move(sizes)) {}

  Device device() const { return {}; }
  bool is_contiguous() const { return true; }
  bool defined() const { return data_ != nullptr; }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t i) const { return sizes_.at(static_cast<size_t>(i < 0 ? i + dim() : i)); }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : sizes_) count *= size;
    return count;
  }
  ScalarType scalar_type() const { return type_; }
  void* data_ptr() const { return data_; }
  template <typename T>
  T* data_ptr() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  ScalarType type_ = kHalf;
  std::vector<int64_t> sizes_;
};

}  // namespace at

#define TORCH_CHECK(condition, ...) \
  do {                              \
    if (!(condition)) throw std::invalid_argument("the kernel refused: " #condition); \
  } while (0)

#endif /* GLM53_BENCH_STOCK_TENSOR_H_ */
