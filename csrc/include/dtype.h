// Dtype: the type of a tensor's elements, by PyTorch's numbers and names.
//
// Failure: DtypeNamed and ElementBytes throw std::runtime_error.
#ifndef TORCH_HYBRID_BACKEND_DTYPE_H_
#define TORCH_HYBRID_BACKEND_DTYPE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "kernel_abi.h"

namespace torch_hybrid_backend {

// The numbers are those of PyTorch's ScalarType, which its files hold: a tensor's dtype is cast.
// PyTorch's other dtypes (quantized ones, bits) have no name here, and no plan has them.
enum class Dtype : int8_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex32 = 8,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBfloat16 = 15,
  kFloat8E5m2 = 23,
  kFloat8E4m3fn = 24,
  kFloat8E5m2fnuz = 25,
  kFloat8E4m3fnuz = 26,
  kUint16 = 27,
  kUint32 = 28,
  kUint64 = 29,
  kFloat8E8m0fnu = 44,
  kFloat4E2m1fnX2 = 45,
};

// The dtype that torch calls so ("float32"); throws for an unknown one.
Dtype DtypeNamed(std::string_view name);

// As torch names it; "dtype 12" for one without a name here.
std::string NameOf(Dtype dtype);

int64_t ElementBytes(Dtype dtype);

// As kernels are told it: an opaque handle for a dtype that no kernel computes with.
DLDataType ToDlpack(Dtype dtype);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_DTYPE_H_
