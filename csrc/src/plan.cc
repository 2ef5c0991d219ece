#include "plan.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

namespace torch_hybrid_backend {
namespace {

using torch::stable::Tensor;

constexpr size_t kNever = std::numeric_limits<size_t>::max();

bool HasTensor(ValueKind kind) {
  return kind != ValueKind::kConstant && kind != ValueKind::kArena;
}

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

}  // namespace

size_t Plan::AddValue(ValueKind kind, int64_t payload, Layout layout) {
  if (sealed_) Refuse("a sealed plan takes no more values");
  if (layout.sizes.size() != layout.strides.size()) Refuse("a value needs one stride for each size");
  if (payload < 0) Refuse("a value's payload cannot be negative");
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
                     const std::vector<int64_t>& values) {
  if (sealed_) Refuse("a sealed plan takes no more steps");
  std::vector<size_t> checked = Checked(values);
  for (const size_t value : checked) {
    if (values_[value].kind == ValueKind::kRawInput) Refuse("kernels cannot read a raw input");
  }
  const size_t first = arguments_;
  arguments_ += checked.size();
  steps_.push_back({Kernel{FindKernel(library, symbol), symbol, first, std::move(checked)}, {}, {}});
}

void Plan::AddCallback(int64_t segment, const std::vector<int64_t>& inputs,
                       const std::vector<int64_t>& outputs) {
  if (sealed_) Refuse("a sealed plan takes no more steps");
  Callback callback{segment, Checked(inputs), Checked(outputs)};
  for (const size_t value : callback.inputs) RequireTensor(value, "a callback reads");
  for (const size_t value : callback.outputs) {
    if (values_[value].kind != ValueKind::kReturned) Refuse("a callback fills only returned values");
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
  sealed_ = true;
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

std::unique_ptr<Frame> Plan::NewFrame() const {
  auto frame = std::make_unique<Frame>();
  frame->arena = AlignedBlock(arena_bytes_);
  frame->tensors.resize(values_.size());
  frame->views.reserve(values_.size());
  for (const Value& value : values_) {
    frame->views.push_back(DLTensor{nullptr,
                                    {kDLCPU, 0},
                                    1,
                                    ToDlpack(value.layout.dtype),
                                    const_cast<int64_t*>(&value.span),
                                    nullptr,
                                    0});
  }
  for (size_t v = 0; v < values_.size(); ++v) {
    if (values_[v].kind != ValueKind::kArena) continue;
    SetData(*frame, v, static_cast<char*>(frame->arena.data()) + values_[v].payload);
  }
  frame->arguments.reserve(arguments_);
  for (const Step& step : steps_) {
    const auto* kernel = std::get_if<Kernel>(&step.action);
    if (kernel == nullptr) continue;
    for (const size_t value : kernel->values) {
      TVMFFIAny argument{};
      argument.type_index = kTVMFFIDLTensorPtr;
      argument.v_ptr = &frame->views[value];
      frame->arguments.push_back(argument);
    }
  }
  return frame;
}

RunResult Plan::Run(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs) {
  if (!sealed_) Refuse("a plan must be sealed before it runs");
  if (static_cast<int64_t>(binding.size()) != constants_) Refuse("the binding is another plan's");
  if (inputs.size() != inputs_) {
    Refuse("the plan takes " + std::to_string(inputs_) + " inputs, not " +
           std::to_string(inputs.size()));
  }
  if (binding.IsStale()) return {{}, RunStatus::kStaleBinding};
  std::unique_ptr<Frame> idle = frames_.TakeIdle();
  const FramePool::Lease frame(frames_, idle ? std::move(idle) : NewFrame());
  BindConstants(*frame, binding);
  BindInputs(*frame, inputs);
  if (!RunSteps(*frame, key)) return {{}, RunStatus::kCallbackRaised};
  return {Outputs(*frame), RunStatus::kDone};
}

void Plan::BindConstants(Frame& frame, const Binding& binding) const {
  for (size_t v = 0; v < values_.size(); ++v) {
    if (values_[v].kind == ValueKind::kConstant) SetData(frame, v, binding.data(values_[v].payload));
  }
}

void Plan::BindInputs(Frame& frame, const std::vector<Tensor>& inputs) const {
  for (size_t v = 0; v < values_.size(); ++v) {
    const Value& value = values_[v];
    if (value.kind != ValueKind::kInput && value.kind != ValueKind::kRawInput) continue;
    const Tensor& input = inputs[value.payload];
    const Match match = Compare(input, value.layout);
    if (match == Match::kDifferent) {
      Refuse("input " + std::to_string(value.payload) + " is " + Describe(input) +
             ", but the plan was built for " + value.layout.ToString());
    }
    if (value.kind == ValueKind::kRawInput || match == Match::kExact) {
      frame.tensors[v] = input;
    } else if (match == Match::kSameMemory) {
      frame.tensors[v] = Reinterpret(input, value.layout);
    } else {
      frame.tensors[v] = Restride(input, value.layout);
    }
    if (value.kind == ValueKind::kInput) SetData(frame, v, frame.tensors[v]->data_ptr());
  }
}

void Plan::SetData(Frame& frame, size_t root, void* data) const {
  frame.views[root].data = data;
  for (const size_t alias : aliases_[root]) frame.views[alias].data = data;
}

const Tensor& Plan::TensorOf(Frame& frame, size_t value) const {
  std::optional<Tensor>& tensor = frame.tensors[value];
  if (!tensor) {
    const std::optional<Tensor>& shared = frame.tensors[values_[value].root];
    if (!shared) Refuse("value " + std::to_string(value) + " is read before it is written");
    tensor = Reinterpret(*shared, values_[value].layout);
  }
  return *tensor;
}

bool Plan::RunSteps(Frame& frame, int64_t key) const {
  for (const Step& step : steps_) {
    for (const size_t v : step.allocates) {
      frame.tensors[v] = Empty(values_[v].layout);
      SetData(frame, v, frame.tensors[v]->data_ptr());
    }
    if (const auto* kernel = std::get_if<Kernel>(&step.action)) {
      RunKernel(frame, *kernel);
    } else if (const auto* callback = std::get_if<Callback>(&step.action)) {
      if (!RunCallback(frame, key, *callback)) return false;
    } else {
      const auto& copy = std::get<Copy>(step.action);
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(TensorOf(frame, copy.destination).get(),
                                                     TensorOf(frame, copy.source).get(),
                                                     /*non_blocking=*/0));
    }
    for (const size_t v : step.releases) {
      frame.tensors[v].reset();
      for (const size_t alias : aliases_[v]) frame.tensors[alias].reset();
    }
  }
  return true;
}

void Plan::RunKernel(Frame& frame, const Kernel& kernel) const {
  TVMFFIAny result{};
  const int status =
      kernel.function(nullptr, frame.arguments.data() + kernel.first_argument,
                      static_cast<int32_t>(kernel.values.size()), &result);
  if (status == 0) return;
  const std::string message = TakeKernelError();
  Refuse("the kernel " + kernel.symbol + " failed with status " + std::to_string(status) +
         (message.empty() ? "" : ": " + message));
}

bool Plan::RunCallback(Frame& frame, int64_t key, const Callback& callback) const {
  std::vector<Tensor> inputs;
  inputs.reserve(callback.inputs.size());
  for (const size_t value : callback.inputs) inputs.push_back(TensorOf(frame, value));
  // An exception would lose its type on the way through the C interface, so the Python side keeps it and answers with
  // one tensor too many. (A second result would say so more plainly, but torch_call_dispatcher mixes up the types
  // of several results.)
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const auto expected_count = static_cast<int64_t>(callback.outputs.size());
  std::array<StableIValue, 4> stack{from(key), from(callback.segment), from(expected_count),
                                    from(inputs)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("torch_hybrid_backend::run_segment", "",
                                                      stack.data(), TORCH_ABI_VERSION));
  std::vector<Tensor> outputs = to<std::vector<Tensor>>(stack[0]);
  if (outputs.size() != callback.outputs.size()) return false;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const size_t v = callback.outputs[i];
    const Layout& expected = values_[v].layout;
    const Match match = Compare(outputs[i], expected);
    if (match == Match::kDifferent) {
      Refuse("output " + std::to_string(i) + " of segment " + std::to_string(callback.segment) +
             " is " + Describe(outputs[i]) + " instead of " + expected.ToString());
    }
    if (match == Match::kExact) {
      frame.tensors[v] = std::move(outputs[i]);
    } else {
      frame.tensors[v] = match == Match::kSameMemory ? Reinterpret(outputs[i], expected)
                                                     : Restride(outputs[i], expected);
    }
    SetData(frame, v, frame.tensors[v]->data_ptr());
  }
  return true;
}

std::vector<Tensor> Plan::Outputs(Frame& frame) const {
  std::vector<Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const size_t value : outputs_) outputs.push_back(TensorOf(frame, value));
  return outputs;
}

}  // namespace torch_hybrid_backend
