// WriteRows: new rows of tensors, such as the keys and values of one token in a KV cache, written
// in one call. A call of PyTorch's operator for each takes 5 to 10 us.
//
// Ownership: the tensors live as long as the call.
//
// Failure: throws std::out_of_range for a position that its target does not have, before anything
// is written.
#ifndef TORCH_HYBRID_BACKEND_ROW_WRITES_H_
#define TORCH_HYBRID_BACKEND_ROW_WRITES_H_

#include <cstdint>
#include <span>

#include "tensor.h"

namespace torch_hybrid_backend {

// target[..., index[i], ...] = source[..., i, ...], `index` along dimension `dim`; negative
// positions count from the end.
struct RowWrite {
  Tensor target;
  int64_t dim;
  Tensor index;   // int64, one dimension
  Tensor source;  // of the target's dtype; leading dimensions of size 1 may be missing
};

// False, and nothing is written, where a tensor is not on the host or its form is another one.
bool WriteRows(std::span<const RowWrite> writes);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ROW_WRITES_H_
