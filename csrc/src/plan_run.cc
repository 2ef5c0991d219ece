// The running half of plan.h; plan.cc builds.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "plan.h"
#include "profiler_range.h"
#include "team.h"

namespace torch_hybrid_backend {
namespace {

using torch::stable::Tensor;

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

}  // namespace

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
    for (const int64_t size : kernel->sizes) {
      TVMFFIAny argument{};
      argument.type_index = kTVMFFIInt;
      argument.v_int64 = size;
      frame->arguments.push_back(argument);
    }
  }
  return frame;
}

std::unique_ptr<Frame> Plan::BoundFrame(const Binding& binding, const std::vector<Tensor>& inputs) {
  if (!sealed_) Refuse("a plan must be sealed before it runs");
  if (static_cast<int64_t>(binding.size()) != constants_) Refuse("the binding is another plan's");
  if (inputs.size() != inputs_) {
    Refuse("the plan takes " + std::to_string(inputs_) + " inputs, not " +
           std::to_string(inputs.size()));
  }
  if (binding.IsStale()) return nullptr;
  std::unique_ptr<Frame> frame = frames_.TakeIdle();
  if (!frame) frame = NewFrame();
  BindConstants(*frame, binding);
  BindInputs(*frame, inputs);
  return frame;
}

std::vector<int64_t> Plan::Time(int64_t key, const Binding& binding,
                                const std::vector<Tensor>& inputs) {
  std::unique_ptr<Frame> bound = BoundFrame(binding, inputs);
  if (!bound) return {};
  const FramePool::Lease frame(frames_, std::move(bound));
  std::vector<int64_t> times;
  times.reserve(steps_.size());
  for (const Step& step : steps_) {
    const auto start = std::chrono::steady_clock::now();
    if (!RunStep(*frame, key, step)) return {};
    const auto spent = std::chrono::steady_clock::now() - start;
    times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
  }
  return times;
}

RunResult Plan::Run(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs,
                    bool profiled) {
  std::unique_ptr<Frame> bound = BoundFrame(binding, inputs);
  if (!bound) return {{}, RunStatus::kStaleBinding};
  const FramePool::Lease frame(frames_, std::move(bound));
  const bool done = profiled ? RunStepsProfiled(*frame, key) : RunSteps(*frame, key);
  if (!done) return {{}, RunStatus::kCallbackRaised};
  return {Outputs(*frame), RunStatus::kDone};
}

void Plan::BindConstants(Frame& frame, const Binding& binding) const {
  for (size_t v = 0; v < values_.size(); ++v) {
    if (values_[v].kind == ValueKind::kConstant)
      SetData(frame, v, binding.data(values_[v].payload));
  }
  for (const size_t v : tensor_constants_) {
    frame.tensors[v] = binding.tensor(values_[v].payload);
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
    if (value.kind == ValueKind::kInput) {
      SetData(frame, v, HostData(*frame.tensors[v], value.layout));
    }
  }
}

void Plan::SetData(Frame& frame, size_t root, void* data) const {
  // An empty tensor has no memory, but vectors read its first element where a guard then drops it.
  alignas(64) static std::byte nothing[256];
  if (data == nullptr) data = nothing;
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

Tensor Plan::NewTensor(const Value& value) const {
  const size_t size_bytes = SizeBytes(value);
  if (size_bytes <= kLargeBytes) return Empty(value.layout);
  try {
    return Over(kept_->Take(size_bytes), value.layout, kept_);
  } catch (const std::bad_alloc&) {
    return Empty(value.layout);  // raises the error that PyTorch raises without memory
  }
}

bool Plan::RunStep(Frame& frame, int64_t key, const Step& step) const {
  for (const size_t v : step.allocates) {
    frame.tensors[v] = NewTensor(values_[v]);
    SetData(frame, v, frame.tensors[v]->data_ptr());
  }
  if (const auto* kernel = std::get_if<Kernel>(&step.action)) {
    RunKernel(frame, *kernel);
  } else if (const auto* call = std::get_if<Operator>(&step.action)) {
    RunOperator(frame, *call);
  } else if (const auto* callback = std::get_if<Callback>(&step.action)) {
    if (!RunCallback(frame, key, *callback)) return false;
  } else {
    const auto& copy = std::get<Copy>(step.action);
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(TensorOf(frame, copy.destination).get(),
                                            TensorOf(frame, copy.source).get(),
                                            /*non_blocking=*/0));
  }
  for (const size_t v : step.releases) {
    frame.tensors[v].reset();
    for (const size_t alias : aliases_[v]) frame.tensors[alias].reset();
  }
  return true;
}

bool Plan::RunSteps(Frame& frame, int64_t key) const {
  const auto is_kernel = [](const Step& step) {
    return std::holds_alternative<Kernel>(step.action);
  };
  for (auto step = steps_.begin(); step != steps_.end();) {
    // Other steps start parallel regions of their own.
    const auto end = std::find_if_not(step, steps_.end(), is_kernel);
    if (end - step > 1) {
      RunInTeam([&] {
        for (; step != end; ++step) RunStep(frame, key, *step);
      });
    } else if (!RunStep(frame, key, *step++)) {
      return false;
    }
  }
  return true;
}

bool Plan::RunStepsProfiled(Frame& frame, int64_t key) const {
  std::optional<ProfilerRange> range;
  size_t next = 0;
  for (size_t s = 0; s < steps_.size(); ++s) {
    for (; next < ranges_.size() && ranges_[next].first_step <= s; ++next) {
      range.reset();  // ends before the next one begins: ranges of one thread nest
      range.emplace(ranges_[next].name);
    }
    std::optional<ProfilerRange> inner;
    if (const auto* kernel = std::get_if<Kernel>(&steps_[s].action)) inner.emplace(kernel->symbol);
    if (!RunStep(frame, key, steps_[s])) return false;
  }
  return true;
}

void Plan::RunKernel(Frame& frame, const Kernel& kernel) const {
  TVMFFIAny result{};
  const int status = kernel.function(nullptr, frame.arguments.data() + kernel.first_argument,
                                     static_cast<int32_t>(kernel.arguments()), &result);
  if (status == 0) return;
  Refuse("the kernel " + kernel.symbol + " failed with status " + std::to_string(status) +
         ": kernels fail only where there is too little memory for their scratch space");
}

void Plan::RunOperator(Frame& frame, const Operator& step) const {
  const auto tensor = [&](size_t i) -> const Tensor& { return TensorOf(frame, step.tensors[i]); };
  Receive(frame, step.result, step.call.Call(tensor), "the result of " + step.call.name());
}

void Plan::Receive(Frame& frame, size_t value, Tensor tensor, const std::string& from) const {
  const Layout& expected = values_[value].layout;
  const Match match = Compare(tensor, expected);
  if (match == Match::kDifferent) {
    Refuse(from + " is " + Describe(tensor) + " instead of " + expected.ToString());
  }
  if (match == Match::kExact) {
    frame.tensors[value] = std::move(tensor);
  } else {
    frame.tensors[value] =
        match == Match::kSameMemory ? Reinterpret(tensor, expected) : Restride(tensor, expected);
  }
  SetData(frame, value, HostData(*frame.tensors[value], expected));
}

bool Plan::RunCallback(Frame& frame, int64_t key, const Callback& callback) const {
  std::vector<Tensor> inputs;
  inputs.reserve(callback.inputs.size());
  for (const size_t value : callback.inputs) inputs.push_back(TensorOf(frame, value));
  // An exception would lose its type on the way through the C interface, so the Python side keeps
  // it and answers with one tensor too many. (A second result would say so more plainly, but
  // torch_call_dispatcher mixes up the types of several results.)
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const auto expected_count = static_cast<int64_t>(callback.outputs.size());
  std::array<StableIValue, 4> stack{from(key), from(callback.segment), from(expected_count),
                                    from(inputs)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("torch_hybrid_backend::run_segment", "",
                                               stack.data(), TORCH_ABI_VERSION));
  std::vector<Tensor> outputs = to<std::vector<Tensor>>(stack[0]);
  if (outputs.size() != callback.outputs.size()) return false;
  for (size_t i = 0; i < outputs.size(); ++i) {
    Receive(frame, callback.outputs[i], std::move(outputs[i]),
            "output " + std::to_string(i) + " of segment " + std::to_string(callback.segment));
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
