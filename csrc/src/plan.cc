#include "plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace torch_hybrid_backend {
namespace {

constexpr size_t kNever = std::numeric_limits<size_t>::max();

bool HasTensor(ValueKind kind) { return kind != ValueKind::kConstant && kind != ValueKind::kArena; }

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

}  // namespace

size_t Plan::AddValue(ValueKind kind, int64_t payload, Layout layout) {
  if (sealed_) Refuse("a sealed plan takes no more values");
  if (layout.sizes.size() != layout.strides.size())
    Refuse("a value needs one stride for each size");
  if (payload < 0) Refuse("a value's payload cannot be negative");
  if (!layout.on_cpu && (kind == ValueKind::kArena || kind == ValueKind::kFresh))
    Refuse("a plan makes memory on the CPU only");
  const size_t number = values_.size();
  size_t root = number;
  const int64_t span = layout.Span();
  if (kind == ValueKind::kAlias) {
    root = values_[Checked(payload)].root;
    const Value& shared = values_[root];
    if (shared.kind == ValueKind::kRawInput) Refuse("an input passed as it is cannot be aliased");
    if (shared.layout.dtype != layout.dtype || span > shared.span) {
      Refuse("an alias must have the dtype of the value it aliases and fit in it");
    }
  }
  values_.push_back({kind, payload, std::move(layout), span, root});
  aliases_.emplace_back();
  if (root != number) aliases_[root].push_back(number);
  return number;
}

void Plan::AddKernel(const std::string& library, const std::string& symbol,
                     const std::vector<int64_t>& values, std::vector<int64_t> sizes) {
  if (sealed_) Refuse("a sealed plan takes no more steps");
  std::vector<size_t> checked = Checked(values);
  for (const size_t value : checked) {
    if (values_[value].kind == ValueKind::kRawInput) Refuse("kernels cannot read a raw input");
    if (!values_[value].layout.on_cpu)
      Refuse("kernels run on the CPU and cannot read a value that is elsewhere");
  }
  LoadedKernel loaded = FindKernel(library, symbol);  // may throw: the plan is unchanged
  Kernel kernel{loaded.function, std::move(loaded.library), symbol,
                arguments_,      std::move(checked),        std::move(sizes)};
  arguments_ += kernel.arguments();
  steps_.push_back({std::move(kernel), {}, {}});
}

void Plan::AddOperator(OperatorCall call, const std::vector<int64_t>& tensors, int64_t result) {
  if (sealed_) Refuse("a sealed plan takes no more steps");
  Operator step{std::move(call), Checked(tensors), Checked(result)};
  if (step.tensors.size() != step.call.tensors()) {
    Refuse(step.call.name() + " takes " + std::to_string(step.call.tensors()) + " tensors, not " +
           std::to_string(step.tensors.size()));
  }
  if (values_[step.result].kind != ValueKind::kReturned)
    Refuse("an operator fills only returned values");
  for (const size_t value : step.tensors) {
    if (values_[value].kind == ValueKind::kConstant) {
      tensor_constants_.push_back(value);
    } else {
      RequireTensor(value, "an operator reads");
    }
  }
  steps_.push_back({std::move(step), {}, {}});
}

void Plan::AddCallback(int64_t segment, const std::vector<int64_t>& inputs,
                       const std::vector<int64_t>& outputs) {
  if (sealed_) Refuse("a sealed plan takes no more steps");
  Callback callback{segment, Checked(inputs), Checked(outputs)};
  for (const size_t value : callback.inputs) RequireTensor(value, "a callback reads");
  for (const size_t value : callback.outputs) {
    if (values_[value].kind != ValueKind::kReturned)
      Refuse("a callback fills only returned values");
  }
  steps_.push_back({std::move(callback), {}, {}});
}

void Plan::AddCopy(int64_t source, int64_t destination) {
  if (sealed_) Refuse("a sealed plan takes no more steps");
  const Copy copy{Checked(source), Checked(destination)};
  RequireTensor(copy.source, "a copy reads");
  RequireTensor(copy.destination, "a copy writes");
  steps_.push_back({copy, {}, {}});
}

void Plan::AddRange(std::string name) {
  if (sealed_) Refuse("a sealed plan takes no more steps");
  ranges_.push_back({steps_.size(), std::move(name)});
}

void Plan::Seal(int64_t inputs, int64_t constants, int64_t arena_bytes,
                const std::vector<int64_t>& outputs) {
  if (sealed_) Refuse("the plan is sealed already");
  if (inputs < 0 || constants < 0 || arena_bytes < 0) Refuse("a plan's sizes cannot be negative");
  for (const Value& value : values_) {
    const bool is_input = value.kind == ValueKind::kInput || value.kind == ValueKind::kRawInput;
    if ((is_input && value.payload >= inputs) ||
        (value.kind == ValueKind::kConstant && value.payload >= constants)) {
      Refuse("a value reads an input or constant that the plan does not have");
    }
    if (value.kind != ValueKind::kArena) continue;
    const int64_t bytes = value.span * ElementBytes(value.layout.dtype);
    if (value.payload % static_cast<int64_t>(kAlignment) != 0 ||
        value.payload + bytes > arena_bytes) {
      Refuse("a value lies outside the arena or off its alignment");
    }
  }
  outputs_ = Checked(outputs);
  for (const size_t value : outputs_) RequireTensor(value, "the plan returns");
  inputs_ = inputs;
  constants_ = constants;
  arena_bytes_ = arena_bytes;
  FindLifetimes();
  for (const Value& value : values_) {
    if (value.kind != ValueKind::kFresh || SizeBytes(value) <= kLargeBytes) continue;
    if (!kept_) kept_ = KeptBlocks::OfProcess();
    kept_->Expect(SizeBytes(value));
  }
  sealed_ = true;
}

size_t Plan::SizeBytes(const Value& value) {
  return static_cast<size_t>(value.span * ElementBytes(value.layout.dtype));
}

size_t Plan::Checked(int64_t value) const {
  if (value < 0 || value >= static_cast<int64_t>(values_.size())) {
    Refuse("the plan has no value " + std::to_string(value));
  }
  return value;
}

std::vector<size_t> Plan::Checked(const std::vector<int64_t>& values) const {
  std::vector<size_t> checked;
  checked.reserve(values.size());
  for (const int64_t value : values) checked.push_back(Checked(value));
  return checked;
}

void Plan::RequireTensor(size_t value, const char* user) const {
  if (!HasTensor(values_[values_[value].root].kind)) {
    Refuse(std::string(user) + " value " + std::to_string(value) +
           ", which is a constant or in the arena and must be a tensor");
  }
}

std::vector<size_t> Plan::Touched(const Step& step) {
  if (const auto* kernel = std::get_if<Kernel>(&step.action)) return kernel->values;
  if (const auto* copy = std::get_if<Copy>(&step.action)) return {copy->source, copy->destination};
  if (const auto* call = std::get_if<Operator>(&step.action)) {
    std::vector<size_t> touched = call->tensors;
    touched.push_back(call->result);
    return touched;
  }
  const auto& callback = std::get<Callback>(step.action);
  std::vector<size_t> touched = callback.inputs;
  touched.insert(touched.end(), callback.outputs.begin(), callback.outputs.end());
  return touched;
}

void Plan::FindLifetimes() {
  std::vector<size_t> first(values_.size(), kNever);
  std::vector<size_t> last(values_.size(), kNever);
  for (size_t s = 0; s < steps_.size(); ++s) {
    for (const size_t value : Touched(steps_[s])) {
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
