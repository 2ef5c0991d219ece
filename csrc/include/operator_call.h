// OperatorCall: one operator of PyTorch with its arguments, called through the dispatcher from
// steps of a plan. It runs as it does in eager: on PyTorch's threads, its result a new tensor.
//
// Ownership: it owns copies of its arguments; tensors are given call by call.
//
// Failure: the constructor throws std::runtime_error for arguments that are not described as below;
// Call throws what the operator raises, as std::runtime_error.
#ifndef TORCH_HYBRID_BACKEND_OPERATOR_CALL_H_
#define TORCH_HYBRID_BACKEND_OPERATOR_CALL_H_

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

namespace torch_hybrid_backend {

class OperatorCall {
 public:
  // `name` is "namespace::operator"; its default overload, with one result, is meant. `arguments`
  // has one word for each argument of its schema, separated by spaces:
  //   tensor   the next of the call's tensors
  //   none     nothing
  //   int      the next of `numbers`
  //   ints     the next of `numbers` says how many of those after it are the list
  //   'text'   a string without spaces
  OperatorCall(std::string name, const std::string& arguments, const std::vector<int64_t>& numbers);

  const std::string& name() const { return name_; }
  size_t tensors() const { return tensors_; }

  // `tensor(i)` is the i-th of the call's tensors.
  torch::stable::Tensor Call(
      const std::function<const torch::stable::Tensor&(size_t)>& tensor) const;

 private:
  struct NextTensor {};
  struct None {};
  using Argument = std::variant<NextTensor, None, int64_t, std::vector<int64_t>, std::string>;

  std::string name_;
  std::vector<Argument> arguments_;
  size_t tensors_ = 0;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_OPERATOR_CALL_H_
