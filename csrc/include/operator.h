// Operator: one of PyTorch's with all its arguments but the tensors, for the step in
// src/steps/operator_call.cc.
//
// `_runtime.so` calls LibTorch (torch/operator.cc). The runner has no LibTorch: it asks
// libhybrid_runner_torch.so (runner/operator.cc), where the same code calls it.
//
// Ownership: an operator keeps no tensor of a call. Threads may call it at once.
//
// Failure: throws std::runtime_error with PyTorch's reason.
#ifndef TORCH_HYBRID_BACKEND_OPERATOR_H_
#define TORCH_HYBRID_BACKEND_OPERATOR_H_

#include <memory>
#include <vector>

#include "device.h"
#include "json.h"
#include "tensor.h"

namespace torch_hybrid_backend {

class Operator {
 public:
  using Tensors = std::vector<Tensor>;

  Operator() = default;
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;
  virtual ~Operator() = default;

  // `tensors`: those among its arguments, in their order. Gives for each result of the operator's
  // schema its tensors: one, or those of a list.
  virtual std::vector<Tensors> Call(const std::vector<const Tensor*>& tensors) const = 0;
};

// The operator of a step's description (src/steps/operator_call.cc) on the device. Throws where
// there is none, or an argument is of an unknown kind.
std::unique_ptr<Operator> MakeOperator(const Json& description, const Device& device);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_OPERATOR_H_
