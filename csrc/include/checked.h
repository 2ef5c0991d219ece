// Arithmetic on sizes: a result that does not fit in 64 bits is a std::runtime_error.
#ifndef TORCH_HYBRID_BACKEND_CHECKED_H_
#define TORCH_HYBRID_BACKEND_CHECKED_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace torch_hybrid_backend {

[[noreturn]] inline void RefuseOverflow() {
  throw std::runtime_error(
      "a size does not fit in 64 bits: the tensors of this call are too large");
}

inline int64_t CheckedSum(int64_t x, int64_t y) {
  int64_t sum = 0;
  if (__builtin_add_overflow(x, y, &sum)) RefuseOverflow();
  return sum;
}

inline int64_t CheckedProduct(int64_t x, int64_t y) {
  int64_t product = 0;
  if (__builtin_mul_overflow(x, y, &product)) RefuseOverflow();
  return product;
}

// Elements from the first to the last one addressed; 0 when empty.
inline int64_t SpanOf(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  int64_t span = 1;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;
  }
  for (size_t d = 0; d < sizes.size(); ++d)
    span = CheckedSum(span, CheckedProduct(CheckedSum(sizes[d], -1), strides[d]));
  return span;
}

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_CHECKED_H_
