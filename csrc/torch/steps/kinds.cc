#include "launch.h"
#include "step.h"

namespace torch_hybrid_backend {

// Each in its file in this folder.
std::unique_ptr<Step> MakeLaunchGraph(const Json& description, PlanParts& plan);
std::unique_ptr<Step> MakeExternalCall(const Json& description, PlanParts& plan);
std::unique_ptr<Step> MakeCallback(const Json& description, PlanParts& plan);

std::span<const StepKind> OtherStepKinds() {
  static constexpr StepKind kKinds[] = {{"launch", &MakeDeviceLaunch},
                                        {"external", &MakeExternalCall},
                                        {"callback", &MakeCallback},
                                        {"graph", &MakeLaunchGraph}};
  return kKinds;
}

}  // namespace torch_hybrid_backend
