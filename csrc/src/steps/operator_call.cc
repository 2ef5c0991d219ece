#include <optional>
#include <stdexcept>
#include <utility>

#include "operator.h"
#include "step.h"

namespace torch_hybrid_backend {
namespace {

// How the results of the schema become values: one tensor each, or a list of them. A tensor that
// nobody reads, or that the operator leaves undefined, has no value.
struct Result {
  bool is_list;
  std::vector<std::optional<size_t>> values;
};

// An operator of PyTorch, called as eager calls it: its results are new tensors.
class OperatorCall final : public Step {
 public:
  OperatorCall(std::string name, std::unique_ptr<Operator> called, std::vector<size_t> tensors,
               std::vector<Result> results)
      : operator_(std::move(called)),
        results_(std::move(results)),
        tensors_(std::move(tensors)),
        touched_(tensors_) {
    for (const Result& result : results_) {
      for (const auto& value : result.values) {
        if (value) touched_.push_back(*value);
      }
    }
    from_ =
        (results_.size() == 1 && !results_[0].is_list ? "the result of " : "a result of ") + name;
  }

  std::vector<size_t> Touched() const override { return touched_; }

  bool Run(const RunContext& context) const override {
    std::vector<const Tensor*> tensors;
    tensors.reserve(tensors_.size());
    for (const size_t value : tensors_)
      tensors.push_back(&context.values.TensorOf(context.frame, value));
    std::vector<Operator::Tensors> returned = operator_->Call(tensors);
    for (size_t i = 0; i < results_.size(); ++i) Receive(context, results_[i], returned.at(i));
    return true;
  }

 private:
  void Receive(const RunContext& context, const Result& result,
               std::vector<Tensor>& tensors) const {
    if (tensors.size() != result.values.size()) {
      throw std::runtime_error(from_ + " has " + std::to_string(tensors.size()) +
                               " tensors instead of " + std::to_string(result.values.size()));
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (result.values[i])
        context.values.Receive(context.frame, *result.values[i], std::move(tensors[i]), from_);
    }
  }

  const std::unique_ptr<Operator> operator_;
  const std::vector<Result> results_;
  const std::vector<size_t> tensors_;
  std::vector<size_t> touched_;
  std::string from_;  // for errors
};

// The values that an argument names, in order.
void ReadTensors(const Json& argument, PlanParts& plan, std::vector<size_t>& tensors) {
  const std::vector<Json>& words = argument.AsList();
  const std::string& kind = words.at(0).AsString();
  if (kind == "tensor") {
    tensors.push_back(plan.Tensor(words.at(1).AsInt(), "an operator reads", true));
  } else if (kind == "some") {
    ReadTensors(words.at(1), plan, tensors);
  } else if (kind == "list") {
    for (const Json& item : words.at(1).AsList()) ReadTensors(item, plan, tensors);
  }
}

std::optional<size_t> ReadResult(const Json& value, PlanParts& plan) {
  if (value.IsNull()) return std::nullopt;
  return plan.Returned(value.AsInt(), "an operator");
}

}  // namespace

// {"name": "namespace::operator", "overload", "arguments": in the order of its schema (see
// torch/operator.cc), "results": for each result of the schema a value, null, or a list of these}
std::unique_ptr<Step> MakeOperatorCall(const Json& description, PlanParts& plan) {
  std::vector<size_t> tensors;
  for (const Json& argument : description["arguments"].AsList())
    ReadTensors(argument, plan, tensors);
  std::vector<Result> results;
  for (const Json& result : description["results"].AsList()) {
    results.push_back({result.IsList(), {}});
    if (!result.IsList()) {
      results.back().values.push_back(ReadResult(result, plan));
      continue;
    }
    for (const Json& value : result.AsList())
      results.back().values.push_back(ReadResult(value, plan));
  }
  const std::string& overload = description["overload"].AsString();
  std::string name = description["name"].AsString() + (overload.empty() ? "" : "." + overload);
  return std::make_unique<OperatorCall>(std::move(name), MakeOperator(description, plan.device),
                                        std::move(tensors), std::move(results));
}

}  // namespace torch_hybrid_backend
