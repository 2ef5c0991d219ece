#include <torch/csrc/stable/library.h>

#include <array>
#include <utility>

#include "step.h"

namespace torch_hybrid_backend {
namespace {

// Runs a function of the plan's Python side: an eager segment, or a step that only Python can run.
class Callback final : public Step {
 public:
  Callback(int64_t function, std::vector<size_t> inputs, std::vector<size_t> outputs)
      : function_(function), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      names_.push_back("output " + std::to_string(i) + " of segment " + std::to_string(function_));
    }
  }

  std::vector<size_t> Touched() const override {
    std::vector<size_t> touched = inputs_;
    touched.insert(touched.end(), outputs_.begin(), outputs_.end());
    return touched;
  }

  bool Run(const RunContext& context) const override {
    std::vector<Tensor> inputs;
    inputs.reserve(inputs_.size());
    for (const size_t value : inputs_)
      inputs.push_back(context.values.TensorOf(context.frame, value));
    // An exception would lose its type on the way through the C interface, so the Python side keeps
    // it and answers with one tensor too many. (A second result would say so more plainly, but
    // torch_call_dispatcher mixes up the types of several results.)
    using torch::stable::detail::from;
    using torch::stable::detail::to;
    const auto expected_count = static_cast<int64_t>(outputs_.size());
    std::array<StableIValue, 4> stack{from(context.plan), from(function_), from(expected_count),
                                      from(inputs)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("torch_hybrid_backend::run_segment", "",
                                                 stack.data(), TORCH_ABI_VERSION));
    std::vector<Tensor> outputs = to<std::vector<Tensor>>(stack[0]);
    if (outputs.size() != outputs_.size()) return false;
    for (size_t i = 0; i < outputs.size(); ++i) {
      context.values.Receive(context.frame, outputs_[i], std::move(outputs[i]), names_[i]);
    }
    return true;
  }

 private:
  const int64_t function_;
  const std::vector<size_t> inputs_;
  const std::vector<size_t> outputs_;
  std::vector<std::string> names_;  // of the outputs, for errors
};

}  // namespace

// {"function": its position among the plan's callbacks, "inputs", "outputs": values}
std::unique_ptr<Step> MakeCallback(const Json& description, PlanParts& plan) {
  std::vector<size_t> inputs;
  std::vector<size_t> outputs;
  for (const int64_t value : description["inputs"].AsInts())
    inputs.push_back(plan.Tensor(value, "a callback reads", true));
  for (const int64_t value : description["outputs"].AsInts())
    outputs.push_back(plan.Returned(value, "a callback"));
  return std::make_unique<Callback>(description["function"].AsInt(), std::move(inputs),
                                    std::move(outputs));
}

}  // namespace torch_hybrid_backend
