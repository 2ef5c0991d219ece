// The kinds of step that the runner refuses.
#include <stdexcept>
#include <string>

#include "step.h"

namespace torch_hybrid_backend {
namespace {

std::unique_ptr<Step> RefuseCallback(const Json&, PlanParts&) {
  throw std::runtime_error(
      "the plan has a part that only Python can run (not_exportable): run the file by "
      "torch_hybrid_backend.load");
}

std::unique_ptr<Step> RefuseOther(const Json& description, PlanParts&) {
  throw std::runtime_error("the plan has a step of the kind \"" + description["kind"].AsString() +
                           "\", which the runner has not: export the model for the CPU");
}

}  // namespace

std::span<const StepKind> OtherStepKinds() {
  static constexpr StepKind kKinds[] = {{"callback", &RefuseCallback},
                                        {"launch", &RefuseOther},
                                        {"external", &RefuseOther},
                                        {"graph", &RefuseOther}};
  return kKinds;
}

}  // namespace torch_hybrid_backend
