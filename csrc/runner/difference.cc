#include "difference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "value.h"

namespace torch_hybrid_backend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Bfloat16 {
  uint16_t bits;
  explicit operator double() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

struct Float16 {
  uint16_t bits;
  explicit operator double() const {
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    double value = 0;
    if (exponent == 31) {
      value = fraction == 0 ? kInfinity : std::numeric_limits<double>::quiet_NaN();
    } else {
      value =
          exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
    }
    return (bits & 0x8000) != 0 ? -value : value;
  }
};

int64_t ElementsOf(const Tensor& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.sizes()) count *= size;
  return count;
}

template <typename T>
Difference CompareAs(const Tensor& tensor, const Tensor& expected, int64_t count) {
  const T* const values = static_cast<const T*>(tensor.data_ptr());
  const T* const wanted = static_cast<const T*>(expected.data_ptr());
  Difference difference{0, 0};
  for (int64_t i = 0; i < count; ++i) {
    const auto a = static_cast<double>(values[i]);
    const auto b = static_cast<double>(wanted[i]);
    if (std::isfinite(b))
      difference.largest_value = std::max(difference.largest_value, std::abs(b));
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    const double apart = std::abs(a - b);
    difference.largest = std::max(difference.largest, std::isfinite(apart) ? apart : kInfinity);
  }
  return difference;
}

bool IsComplex(Dtype dtype) {
  return dtype == Dtype::kComplex32 || dtype == Dtype::kComplex64 || dtype == Dtype::kComplex128;
}

}  // namespace

Tensor RowMajorCopy(const Tensor& tensor) {
  std::vector<int64_t> strides(tensor.sizes().size());
  int64_t stride = 1;
  for (size_t d = strides.size(); d-- > 0; stride *= tensor.sizes()[d]) strides[d] = stride;
  return Restride(tensor, Layout{tensor.dtype(), tensor.sizes(), strides, Device::Host()});
}

Difference DifferenceOf(const Tensor& tensor, const Tensor& expected) {
  const Tensor a = RowMajorCopy(tensor);
  const Tensor b = RowMajorCopy(expected);
  const int64_t count = ElementsOf(a) * (IsComplex(a.dtype()) ? 2 : 1);
  switch (a.dtype()) {
    case Dtype::kFloat16:
    case Dtype::kComplex32:
      return CompareAs<Float16>(a, b, count);
    case Dtype::kBfloat16:
      return CompareAs<Bfloat16>(a, b, count);
    case Dtype::kFloat32:
    case Dtype::kComplex64:
      return CompareAs<float>(a, b, count);
    case Dtype::kFloat64:
    case Dtype::kComplex128:
      return CompareAs<double>(a, b, count);
    default: {
      const auto bytes = static_cast<size_t>(count * ElementBytes(a.dtype()));
      const bool same = bytes == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), bytes) == 0;
      return {same ? 0 : kInfinity, 0};
    }
  }
}

void InvertSigns(const Tensor& tensor, bool conjugate, bool negative) {
  const bool is_complex = IsComplex(tensor.dtype());
  const int64_t part = ElementBytes(tensor.dtype()) / (is_complex ? 2 : 1);
  const int64_t parts = ElementsOf(tensor) * (is_complex ? 2 : 1);
  // Little-endian: the sign is in the last byte.
  auto* const sign = static_cast<uint8_t*>(tensor.data_ptr()) + part - 1;
  for (int64_t i = 0; i < parts; ++i) {
    const bool is_imaginary = is_complex && i % 2 == 1;
    if (negative != (conjugate && is_imaginary)) sign[i * part] ^= 0x80;
  }
}

}  // namespace torch_hybrid_backend
