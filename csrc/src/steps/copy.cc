#include "step.h"

namespace torch_hybrid_backend {
namespace {

// Copies between values of one shape and possibly different strides and devices.
class Copy final : public Step {
 public:
  Copy(size_t source, size_t destination) : source_(source), destination_(destination) {}

  std::vector<size_t> Touched() const override { return {source_, destination_}; }

  bool Run(const RunContext& context) const override {
    CopyElements(context.values.TensorOf(context.frame, source_),
                 context.values.TensorOf(context.frame, destination_));
    return true;
  }

 private:
  const size_t source_;
  const size_t destination_;
};

}  // namespace

// {"source", "destination": values}
std::unique_ptr<Step> MakeCopy(const Json& description, PlanParts& plan) {
  const size_t source = plan.Tensor(description["source"].AsInt(), "a copy reads", false);
  return std::make_unique<Copy>(
      source, plan.Tensor(description["destination"].AsInt(), "a copy writes", false));
}

}  // namespace torch_hybrid_backend
