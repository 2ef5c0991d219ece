#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>
#include <vector>

#include "step.h"

namespace torch_hybrid_backend {
namespace {

// Ends the call where a flag is set: a kernel has met values that PyTorch's operators refuse.
class Check final : public Step {
 public:
  Check(std::vector<size_t> flags, std::string title)
      : flags_(std::move(flags)), title_(std::move(title)) {}

  std::vector<size_t> Touched() const override { return flags_; }
  bool InTeam() const override { return true; }

  bool Run(const RunContext& context) const override {
    for (const size_t flag : flags_) {
      const auto* bytes = static_cast<const std::byte*>(context.frame.views[flag].data);
      const auto* end = bytes + context.values[flag].SizeBytes();
      if (std::any_of(bytes, end, [](std::byte byte) { return byte != std::byte{0}; }))
        throw std::runtime_error(title_);
    }
    return true;
  }

 private:
  const std::vector<size_t> flags_;
  const std::string title_;
};

}  // namespace

// {"flags": values that must hold 0, "title": what to throw otherwise}
std::unique_ptr<Step> MakeCheck(const Json& description, PlanParts& plan) {
  std::vector<size_t> flags = plan.Addressed(description["flags"].AsInts(), "a check");
  return std::make_unique<Check>(std::move(flags), description["title"].AsString());
}

}  // namespace torch_hybrid_backend
