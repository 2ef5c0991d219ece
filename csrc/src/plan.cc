#include "plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace torch_hybrid_backend {
namespace {

// Of the description. Python writes the same number (runtime/native/description.py).
constexpr int64_t kVersion = 1;

constexpr size_t kNever = std::numeric_limits<size_t>::max();

bool HasTensor(ValueKind kind) { return kind != ValueKind::kConstant && kind != ValueKind::kArena; }

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

}  // namespace

SubPlans Plan::ReadPlans(const Json& json, const LibraryPaths& library_path) {
  const int64_t version = json["version"].AsInt();
  if (version != kVersion) {
    Refuse("this build of the C++ runtime reads plans of version " + std::to_string(kVersion) +
           ", not of version " + std::to_string(version) + ": build it again");
  }
  SubPlans plans;
  const Json* const described = json.Find("plans");
  if (described == nullptr) return plans;
  for (const Json& each : described->AsList()) {
    plans.emplace_back(new Plan(each, library_path, plans));
    if (plans.back()->constants() != json["constants"].AsInt())
      Refuse("a plan and those that its steps run have the same constants");
  }
  return plans;
}

Plan::Plan(const Json& json, const LibraryPaths& library_path, const SubPlans& plans) {
  inputs_ = json["inputs"].AsInt();
  constants_ = json["constants"].AsInt();
  if (static_cast<int64_t>(inputs_) < 0 || constants_ < 0)
    Refuse("a plan's sizes cannot be negative");
  ReadValues(json["values"]);
  PlanParts parts{.values = values_,
                  .device = Device::Host(),
                  .touched = std::vector<bool>(values_.size()),
                  .streams = {},
                  .tensor_constants = {},
                  .library_path = library_path,
                  .plans = plans};
  ReadArenas(json["arenas"], parts);
  CheckValues();
  ReadSteps(json["steps"], parts);
  for (const Json& range : json["ranges"].AsList())
    ranges_.push_back(
        {static_cast<size_t>(range.AsList().at(0).AsInt()), range.AsList().at(1).AsString()});
  outputs_ = values_.Checked(json["outputs"].AsInts());
  for (const size_t value : outputs_) values_.RequireTensor(value, "the plan returns");
  arguments_ = parts.arguments;
  parameters_ = parts.parameters;
  states_ = parts.states;
  depth_ = parts.depth + 1;
  streams_ = std::move(parts.streams);
  tensor_constants_ = std::move(parts.tensor_constants);
  FindLifetimes();
  ExpectLargeValues();
}

void Plan::ReadValues(const Json& values) {
  // Most values of a plan are on one device: its name is read once.
  std::string name = "cpu";
  Device device = Device::Host();
  for (const Json& value : values.AsList()) {
    const std::vector<Json>& fields = value.AsList();
    if (fields.size() != 6 && fields.size() != 7)
      Refuse("a value is described by six fields, or seven");
    if (fields[5].AsString() != name) {
      name = fields[5].AsString();
      device = Device::Named(name);
    }
    values_.Add(
        ValueKindNamed(fields[0].AsString()), fields[1].AsInt(),
        Layout{DtypeNamed(fields[2].AsString()), fields[3].AsInts(), fields[4].AsInts(), device},
        fields.size() == 7 ? fields[6].AsInt() : 0);
  }
}

void Plan::ReadArenas(const Json& arenas, PlanParts& parts) {
  for (const Json& arena : arenas.AsList()) {
    const Device device = Device::Named(arena.AsList().at(0).AsString());
    const int64_t size_bytes = arena.AsList().at(1).AsInt();
    if (size_bytes < 0) Refuse("a plan's sizes cannot be negative");
    if (ArenaOf(device) != nullptr) Refuse("a plan has one arena on " + device.ToString());
    if (device.is_host) {
      host_arena_.emplace(size_bytes);
    } else {
      parts.StreamOf(device);
    }
    arenas_.push_back({device, size_bytes});
  }
}

const Plan::Arena* Plan::ArenaOf(const Device& device) const {
  const auto found = std::find_if(arenas_.begin(), arenas_.end(),
                                  [&](const Arena& arena) { return arena.device == device; });
  return found == arenas_.end() ? nullptr : &*found;
}

int64_t Plan::ArenaBytes() const {
  int64_t bytes = 0;
  for (const Arena& arena : arenas_) bytes += arena.size_bytes;
  return bytes;
}

void Plan::ReadSteps(const Json& steps, PlanParts& parts) {
  for (const Json& description : steps.AsList()) {
    std::unique_ptr<Step> step = MakeStep(description, parts);
    for (const size_t value : step->Touched()) parts.touched[values_[value].root] = true;
    const auto* kernel = dynamic_cast<const HostKernel*>(step.get());
    const bool in_team = step->InTeam();
    steps_.push_back({std::move(step), kernel, in_team, parts.device, {}, {}});
  }
}

void Plan::CheckValues() const {
  for (size_t v = 0; v < values_.size(); ++v) {
    const Value& value = values_[v];
    const bool is_input = value.kind == ValueKind::kInput || value.kind == ValueKind::kRawInput;
    if ((is_input && value.payload >= static_cast<int64_t>(inputs_)) ||
        (value.kind == ValueKind::kConstant && value.payload >= constants_)) {
      Refuse("a value reads an input or constant that the plan does not have");
    }
    if (value.kind != ValueKind::kArena) continue;
    const Arena* const arena = ArenaOf(value.layout.device);
    const size_t alignment = value.layout.device.is_host ? kAlignment : kDeviceAlignment;
    if (arena == nullptr || value.payload % static_cast<int64_t>(alignment) != 0 ||
        value.payload + static_cast<int64_t>(value.SizeBytes()) > arena->size_bytes) {
      Refuse("a value lies outside the arena or off its alignment");
    }
  }
}

void Plan::ExpectLargeValues() {
  for (size_t v = 0; v < values_.size(); ++v) {
    const Value& value = values_[v];
    if (value.kind != ValueKind::kFresh || !value.layout.device.is_host ||
        value.SizeBytes() <= kLargeBytes) {
      continue;
    }
    if (!kept_) kept_ = KeptBlocks::OfProcess();
    kept_->Expect(value.SizeBytes());
  }
}

void Plan::FindLifetimes() {
  std::vector<size_t> first(values_.size(), kNever);
  std::vector<size_t> last(values_.size(), kNever);
  for (size_t s = 0; s < steps_.size(); ++s) {
    for (const size_t value : steps_[s].step->Touched()) {
      const size_t root = values_[value].root;
      if (first[root] == kNever) first[root] = s;
      last[root] = s;
    }
  }
  for (size_t v = 0; v < values_.size(); ++v) {
    if (values_[v].kind == ValueKind::kFresh && first[v] != kNever) {
      steps_[first[v]].allocates.push_back(v);
    }
  }
  for (const size_t output : outputs_) {
    const size_t root = values_[output].root;
    if (values_[root].kind == ValueKind::kFresh && first[root] == kNever) {
      Refuse("the plan returns value " + std::to_string(output) + ", which no step writes");
    }
    last[root] = kNever;
  }
  for (size_t v = 0; v < values_.size(); ++v) {
    if (values_[v].root == v && last[v] != kNever && HasTensor(values_[v].kind)) {
      steps_[last[v]].releases.push_back(v);
    }
  }
}

}  // namespace torch_hybrid_backend
