// Branches and loops: steps that run other plans.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"
#include "step.h"

namespace torch_hybrid_backend {
namespace {

constexpr int64_t kUnread = -1;  // in place of a value: nobody reads that result

void RequireTruthValue(const Layout& layout, const char* noun) {
  if (layout.dtype != Dtype::kBool || layout.Span() != 1 || !layout.device.is_host) {
    throw std::runtime_error(std::string(noun) + " must be one truth value on the CPU, not " +
                             layout.ToString());
  }
}

bool IsTrue(const Tensor& tensor) { return *static_cast<const uint8_t*>(MemoryOf(tensor)) != 0; }

std::vector<size_t> TensorsIn(const Json& values, PlanParts& plan) {
  std::vector<size_t> tensors;
  for (const int64_t value : values.AsInts())
    tensors.push_back(plan.Tensor(value, "control flow reads", true));
  return tensors;
}

// The values that a step fills; nothing for a result that nobody reads.
std::vector<std::optional<size_t>> ResultsIn(const Json& values, PlanParts& plan) {
  std::vector<std::optional<size_t>> results;
  for (const int64_t value : values.AsInts()) {
    results.emplace_back();
    if (value != kUnread) results.back() = plan.Returned(value, "control flow");
  }
  return results;
}

std::vector<Tensor> Read(const RunContext& context, const std::vector<size_t>& values) {
  std::vector<Tensor> tensors;
  tensors.reserve(values.size());
  for (const size_t value : values)
    tensors.push_back(context.values.TensorOf(context.frame, value));
  return tensors;
}

uintptr_t BytesOf(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const Layout layout{DtypeOf(tensor),
                      {sizes.begin(), sizes.end()},
                      {strides.begin(), strides.end()},
                      Device::Host()};
  return static_cast<uintptr_t>(layout.Span() * ElementBytes(layout.dtype));
}

bool SharesMemory(const Tensor& one, const Tensor& other) {
  const auto begin = reinterpret_cast<uintptr_t>(MemoryOf(one));
  const auto begin_of_other = reinterpret_cast<uintptr_t>(MemoryOf(other));
  return begin < begin_of_other + BytesOf(other) && begin_of_other < begin + BytesOf(one);
}

// Gives the step's values its results, which are tensors of their own: one that is an operand, or
// lies in its memory, is copied, for who gets it may write to it.
void Give(const RunContext& context, std::vector<Tensor> results,
          const std::vector<std::optional<size_t>>& values, const std::vector<Tensor>& operands) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i]) continue;
    const Value& expected = context.values[*values[i]];
    Tensor& result = results[i];
    bool shares = false;
    for (const Tensor& operand : operands) shares = shares || SharesMemory(result, operand);
    if (shares && Compare(result, expected) != Match::kDifferent)
      result = Restride(result, expected.layout);
    context.values.Receive(context.frame, *values[i], std::move(result),
                           "result " + std::to_string(i) + " of control flow");
  }
}

void AddRead(std::vector<size_t>& touched, const std::vector<std::optional<size_t>>& results) {
  for (const auto& result : results) {
    if (result) touched.push_back(*result);
  }
}

// Runs one of two plans.
class Branch final : public Step {
 public:
  Branch(size_t predicate, std::vector<size_t> inputs, std::vector<std::optional<size_t>> outputs,
         std::shared_ptr<Plan> if_true, std::shared_ptr<Plan> if_false)
      : predicate_(predicate),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        if_true_(std::move(if_true)),
        if_false_(std::move(if_false)) {}

  std::vector<size_t> Touched() const override {
    std::vector<size_t> touched = inputs_;
    touched.push_back(predicate_);
    AddRead(touched, outputs_);
    return touched;
  }

  bool Run(const RunContext& context) const override {
    const std::vector<Tensor> operands = Read(context, inputs_);
    const bool is_true = IsTrue(context.values.TensorOf(context.frame, predicate_));
    auto results = (is_true ? if_true_ : if_false_)->RunInside(context, operands);
    if (!results) return false;
    Give(context, std::move(*results), outputs_, operands);
    return true;
  }

 private:
  const size_t predicate_;
  const std::vector<size_t> inputs_;
  const std::vector<std::optional<size_t>> outputs_;
  const std::shared_ptr<Plan> if_true_;
  const std::shared_ptr<Plan> if_false_;
};

// Runs a plan as long as another one says so.
class Loop final : public Step {
 public:
  // `inputs`: the first are carried from one iteration to the next; there is an output for each.
  Loop(std::vector<size_t> inputs, std::vector<std::optional<size_t>> outputs,
       std::shared_ptr<Plan> condition, std::shared_ptr<Plan> body)
      : inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        condition_(std::move(condition)),
        body_(std::move(body)) {}

  std::vector<size_t> Touched() const override {
    std::vector<size_t> touched = inputs_;
    AddRead(touched, outputs_);
    return touched;
  }

  bool Run(const RunContext& context) const override {
    const std::vector<Tensor> operands = Read(context, inputs_);
    std::vector<Tensor> now = operands;
    while (true) {
      const auto goes_on = condition_->RunInside(context, now);
      if (!goes_on) return false;
      if (!IsTrue(goes_on->front())) break;
      auto results = body_->RunInside(context, now);
      if (!results) return false;
      std::move(results->begin(), results->end(), now.begin());
    }
    Give(context, std::move(now), outputs_, operands);
    return true;
  }

 private:
  const std::vector<size_t> inputs_;
  const std::vector<std::optional<size_t>> outputs_;
  const std::shared_ptr<Plan> condition_;
  const std::shared_ptr<Plan> body_;
};

}  // namespace

// {"predicate": a value, one truth value, "plans": [if true, if false], "inputs": values, the
// inputs of both plans, "outputs": values, or -1 for what nobody reads}
std::unique_ptr<Step> MakeBranch(const Json& description, PlanParts& plan) {
  const size_t predicate =
      plan.Tensor(description["predicate"].AsInt(), "control flow reads", true);
  RequireTruthValue(plan.values[predicate].layout, "what a branch asks");
  std::vector<size_t> inputs = TensorsIn(description["inputs"], plan);
  std::vector<std::optional<size_t>> outputs = ResultsIn(description["outputs"], plan);
  const std::vector<int64_t> plans = description["plans"].AsInts();
  if (plans.size() != 2) throw std::runtime_error("a branch has two plans");
  std::shared_ptr<Plan> if_true = plan.Inner(plans[0], inputs.size(), outputs.size());
  std::shared_ptr<Plan> if_false = plan.Inner(plans[1], inputs.size(), outputs.size());
  return std::make_unique<Branch>(predicate, std::move(inputs), std::move(outputs),
                                  std::move(if_true), std::move(if_false));
}

// {"plans": [condition, body], "inputs": values, the inputs of both plans, "outputs": values, or -1
// for what nobody reads}. The outputs of the body are the first inputs of the next iteration.
std::unique_ptr<Step> MakeLoop(const Json& description, PlanParts& plan) {
  std::vector<size_t> inputs = TensorsIn(description["inputs"], plan);
  std::vector<std::optional<size_t>> outputs = ResultsIn(description["outputs"], plan);
  if (outputs.size() > inputs.size())
    throw std::runtime_error("a loop carries more than it is given");
  const std::vector<int64_t> plans = description["plans"].AsInts();
  if (plans.size() != 2) throw std::runtime_error("a loop has two plans");
  std::shared_ptr<Plan> condition = plan.Inner(plans[0], inputs.size(), 1);
  RequireTruthValue(condition->OutputLayout(0), "what tells whether a loop goes on");
  std::shared_ptr<Plan> body = plan.Inner(plans[1], inputs.size(), outputs.size());
  return std::make_unique<Loop>(std::move(inputs), std::move(outputs), std::move(condition),
                                std::move(body));
}

}  // namespace torch_hybrid_backend
