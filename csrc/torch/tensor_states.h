// TensorState: where a tensor's memory is and what its version counter reads, the two things that
// tell in every call whether the constants made from a parameter are still good.
//
// Ownership: none; a handle is read while the caller keeps its tensor alive.
//
// Failure: nothing throws; what cannot be read is no value. LibTorch's stable interface has no
// version counters, so the reader of them is looked up by its name when the library runs: where
// this torch has none of that name, CanReadVersions is false, and the caller reads tensors in
// Python.
#ifndef TORCH_HYBRID_BACKEND_TENSOR_STATES_H_
#define TORCH_HYBRID_BACKEND_TENSOR_STATES_H_

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <optional>

namespace torch_hybrid_backend {

struct TensorState {
  const void* data;
  int64_t version;

  bool operator==(const TensorState&) const = default;
};

bool CanReadVersions();

// No value for a tensor without memory that can be addressed, or, where its version is `counted`,
// without a version counter (made in inference mode). The version of others is 0.
std::optional<TensorState> StateOf(AtenTensorHandle tensor, bool counted);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_TENSOR_STATES_H_
