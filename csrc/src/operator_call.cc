#include "operator_call.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace torch_hybrid_backend {

using torch::stable::Tensor;

OperatorCall::OperatorCall(std::string name, const std::string& arguments,
                           const std::vector<int64_t>& numbers)
    : name_(std::move(name)) {
  size_t used = 0;
  const auto next = [&] {
    if (used >= numbers.size()) throw std::runtime_error(name_ + " is given too few numbers");
    return numbers[used++];
  };
  std::istringstream words(arguments);
  for (std::string word; words >> word;) {
    if (word == "tensor") {
      arguments_.emplace_back(NextTensor{});
      ++tensors_;
    } else if (word == "none") {
      arguments_.emplace_back(None{});
    } else if (word == "int") {
      arguments_.emplace_back(next());
    } else if (word == "ints") {
      std::vector<int64_t> list;
      for (int64_t left = next(); left > 0; --left) list.push_back(next());
      arguments_.emplace_back(std::move(list));
    } else if (word.size() >= 2 && word.front() == '\'' && word.back() == '\'') {
      arguments_.emplace_back(word.substr(1, word.size() - 2));
    } else {
      throw std::runtime_error("no argument of an operator is described by " + word);
    }
  }
  if (used != numbers.size()) throw std::runtime_error(name_ + " is given too many numbers");
}

Tensor OperatorCall::Call(const std::function<const Tensor&(size_t)>& tensor) const {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::vector<StableIValue> stack;
  stack.reserve(arguments_.size());
  size_t next = 0;
  for (const Argument& argument : arguments_) {
    if (std::holds_alternative<NextTensor>(argument)) {
      stack.push_back(from(tensor(next++)));
    } else if (const auto* number = std::get_if<int64_t>(&argument)) {
      stack.push_back(from(*number));
    } else if (const auto* list = std::get_if<std::vector<int64_t>>(&argument)) {
      stack.push_back(from(*list));
    } else if (const auto* text = std::get_if<std::string>(&argument)) {
      stack.push_back(from(*text));
    } else {
      stack.push_back(from(std::nullopt));
    }
  }
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name_.c_str(), "", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

}  // namespace torch_hybrid_backend
