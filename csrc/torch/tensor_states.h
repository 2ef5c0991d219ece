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

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

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

// What guards ask of a tensor, as numbers: dtype, device, dispatch keys (which tell of conjugate
// and negative bits, of inference tensors, of other layouts), whether it requires a gradient,
// dimensions, sizes and strides. `keys`: bytes from the start of a C++ tensor to its dispatch keys.
bool CanReadForms();

// Adds the numbers of a tensor's form. False where they cannot be read.
bool AppendForm(AtenTensorHandle tensor, ptrdiff_t keys, std::vector<int64_t>& numbers);

// Where the numbers at `expected` end, if they are those of the tensor; else null.
const int64_t* BehindForm(AtenTensorHandle tensor, ptrdiff_t keys, const int64_t* expected);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_TENSOR_STATES_H_
