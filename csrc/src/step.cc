#include "step.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace torch_hybrid_backend {
namespace {

constexpr StepKind kKinds[] = {{"kernel", &MakeHostKernel},
                               {"operator", &MakeOperatorCall},
                               {"copy", &MakeCopy},
                               {"check", &MakeCheck}};

}  // namespace

std::unique_ptr<Step> MakeStep(const Json& description, PlanParts& plan) {
  const std::string& kind = description["kind"].AsString();
  const Json* device = description.Find("device");
  plan.device = device == nullptr ? Device::Host() : Device::Named(device->AsString());
  std::string known;
  for (const std::span<const StepKind> kinds :
       {std::span<const StepKind>(kKinds), OtherStepKinds()}) {
    for (const StepKind& each : kinds) {
      if (each.name == kind) return each.make(description, plan);
      known += (known.empty() ? "" : ", ") + std::string(each.name);
    }
  }
  throw std::runtime_error("no kind of step is called \"" + kind + "\": it must be one of " +
                           known);
}

size_t PlanParts::Tensor(int64_t value, const char* user, bool constants) {
  const size_t checked = values.Checked(value);
  if (constants && values[checked].kind == ValueKind::kConstant) {
    if (std::find(tensor_constants.begin(), tensor_constants.end(), checked) ==
        tensor_constants.end()) {
      tensor_constants.push_back(checked);
    }
  } else {
    values.RequireTensor(checked, user);
  }
  return checked;
}

size_t PlanParts::Returned(int64_t value, const char* user) {
  const size_t checked = values.Checked(value);
  if (values[checked].kind != ValueKind::kReturned) {
    throw std::runtime_error(std::string(user) + " fills only returned values");
  }
  return checked;
}

std::vector<size_t> PlanParts::Addressed(const std::vector<int64_t>& numbers, const char* user) {
  std::vector<size_t> checked = values.Checked(numbers);
  for (const size_t value : checked) values.Address(value, device, user);
  return checked;
}

size_t PlanParts::StreamOf(const Device& of) {
  const auto found = std::find(streams.begin(), streams.end(), of);
  if (found != streams.end()) return found - streams.begin();
  if (!of.IsCuda()) {
    throw std::runtime_error(
        "a plan runs kernels and keeps memory on the CPU and on CUDA devices, not on " +
        of.ToString());
  }
  streams.push_back(of);
  return streams.size() - 1;
}

}  // namespace torch_hybrid_backend
