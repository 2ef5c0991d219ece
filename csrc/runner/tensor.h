// Tensor: what plans keep in their values, in the runner: memory of the host, its dtype, sizes and
// strides. `_runtime.so` has another class of this name, and the same functions (torch/tensor.h).
//
// Ownership: a tensor shares its memory with its copies. One that is borrowed owns none.
//
// Failure: nothing here throws but std::bad_alloc.
#ifndef TORCH_HYBRID_BACKEND_TENSOR_H_
#define TORCH_HYBRID_BACKEND_TENSOR_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device.h"
#include "dtype.h"

namespace torch_hybrid_backend {

class Tensor {
 public:
  // `owner`: what is destroyed with the last tensor over the memory; null for borrowed memory.
  Tensor(std::shared_ptr<void> owner, void* data, Dtype dtype, std::vector<int64_t> sizes,
         std::vector<int64_t> strides)
      : state_(std::make_shared<const State>(
            State{std::move(owner), data, dtype, std::move(sizes), std::move(strides)})) {}

  const std::vector<int64_t>& sizes() const { return state_->sizes; }
  const std::vector<int64_t>& strides() const { return state_->strides; }  // in elements
  void* data_ptr() const { return state_->data; }
  Dtype dtype() const { return state_->dtype; }
  const std::shared_ptr<void>& owner() const { return state_->owner; }

 private:
  struct State {
    std::shared_ptr<void> owner;
    void* data;
    Dtype dtype;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };
  std::shared_ptr<const State> state_;
};

inline Dtype DtypeOf(const Tensor& tensor) { return tensor.dtype(); }

inline bool IsOnHost(const Tensor&) { return true; }

inline Device DeviceOf(const Tensor&) { return Device::Host(); }

inline void* MemoryOf(const Tensor& tensor) { return tensor.data_ptr(); }

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_TENSOR_H_
