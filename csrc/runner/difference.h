// How far two tensors are apart: a sample's output, as it was and as it came out.
//
// Failure: throws std::runtime_error where there is no memory.
#ifndef TORCH_HYBRID_BACKEND_DIFFERENCE_H_
#define TORCH_HYBRID_BACKEND_DIFFERENCE_H_

#include "tensor.h"

namespace torch_hybrid_backend {

struct Difference {
  double largest;        // of all elements; infinity where one is NaN or infinite and one is not
  double largest_value;  // of the finite expected ones, absolute
};

// Both have one dtype and one shape. Parts of complex numbers count as elements. Values of other
// dtypes than floating-point and complex ones differ by 0 or by infinity.
Difference DifferenceOf(const Tensor& tensor, const Tensor& expected);

// A copy without gaps, its last dimension innermost.
Tensor RowMajorCopy(const Tensor& tensor);

// Inverts the signs of a row-major tensor's elements in place: of complex numbers, those of the
// imaginary parts where `conjugate`, those of both where `negative`.
void InvertSigns(const Tensor& tensor, bool conjugate, bool negative);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_DIFFERENCE_H_
