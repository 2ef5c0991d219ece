// DLPack's tensors, which callers of the runner have, as plans' tensors, and back.
//
// Ownership: a tensor over a caller's borrows its memory; what ToManaged returns owns its own,
// until its deleter is called.
//
// Failure: throws std::runtime_error with what is expected and what came.
#ifndef TORCH_HYBRID_BACKEND_DLPACK_H_
#define TORCH_HYBRID_BACKEND_DLPACK_H_

#include <string>

#include "hybrid_runner.h"
#include "manifest.h"
#include "value.h"

namespace torch_hybrid_backend {

// As DLPack has it, those that no kernel computes with included.
::DLDataType ToCallersDtype(Dtype dtype);

// A tensor over the caller's, which must have the form's dtype and sizes; it may have any strides.
// Its `ndim` and `shape` must have been checked. `which` names it in errors: "input 0".
Tensor FromDlpack(const ::DLTensor& given, const TensorForm& form, const std::string& which);

// Hands the tensor to a caller. A borrowed one is copied.
::DLManagedTensorVersioned* ToManaged(Tensor tensor);

// "float32(2, 3)"
std::string Shown(const TensorForm& form);

// Of a form, on the host.
Layout LayoutOf(const TensorForm& form);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_DLPACK_H_
