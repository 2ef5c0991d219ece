// Tensor: what plans keep in their values, in `_runtime.so` a tensor of PyTorch's, by LibTorch's
// stable ABI. The runner has another class of this name, and the same functions (runner/tensor.h).
//
// Ownership: a tensor shares its memory with its copies.
//
// Failure: throws std::runtime_error with LibTorch's reason.
#ifndef TORCH_HYBRID_BACKEND_TENSOR_H_
#define TORCH_HYBRID_BACKEND_TENSOR_H_

#include <torch/csrc/stable/tensor.h>

#include "device.h"
#include "dtype.h"

namespace torch_hybrid_backend {

using Tensor = torch::stable::Tensor;  // of which plans use sizes(), strides() and data_ptr()

inline Dtype DtypeOf(const Tensor& tensor) { return static_cast<Dtype>(tensor.scalar_type()); }

inline bool IsOnHost(const Tensor& tensor) { return tensor.is_cpu(); }

Device DeviceOf(const Tensor& tensor);

// Where its elements are; null for a tensor that has no memory of its own that others could read
// (oneDNN's packed weights).
void* MemoryOf(const Tensor& tensor);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_TENSOR_H_
