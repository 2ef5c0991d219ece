// The running half of plan.h; plan.cc builds, torch/plan_profile.cc measures.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "plan.h"

namespace torch_hybrid_backend {
namespace {

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

Streams CurrentStreams(const std::vector<Device>& devices) {
  Streams streams;
  streams.reserve(devices.size());
  for (const Device& device : devices) streams.emplace_back(device, CurrentStream(device));
  return streams;
}

ArenaPool::Block HostArena(size_t size_bytes) {
  try {
    return ArenaPool::Block(size_bytes);
  } catch (const std::bad_alloc&) {
    ArenaPool& pool = ArenaPool::OfProcess();
    const bool had_idle = pool.idle() > 0;
    pool.KeepIdle(0);
    if (!KeptBlocks::FreeIdle() && !had_idle)
      throw std::runtime_error("could not allocate a plan's arena of " +
                               std::to_string(size_bytes) + " bytes");
  }
  return HostArena(size_bytes);
}

}  // namespace

std::unique_ptr<Frame> Plan::NewFrame(Streams streams) const {
  auto frame = std::make_unique<Frame>();
  frame->streams = std::move(streams);
  frame->tensors.resize(values_.size());
  frame->views.reserve(values_.size());
  for (size_t v = 0; v < values_.size(); ++v) {
    const Value& value = values_[v];
    frame->views.push_back(DLTensor{nullptr,
                                    {kDLCPU, 0},
                                    1,
                                    ToDlpack(value.layout.dtype),
                                    const_cast<int64_t*>(&value.span),
                                    nullptr,
                                    0});
  }
  for (const Arena& arena : arenas_) {
    if (arena.device.is_host) continue;
    // On the caller's current stream, for which the frame is kept.
    frame->device_arenas.push_back(
        Empty(Layout{Dtype::kUint8, {arena.size_bytes}, {1}, arena.device}));
    void* const begin = frame->device_arenas.back().data_ptr();
    if (reinterpret_cast<uintptr_t>(begin) % kDeviceAlignment != 0)
      Refuse("PyTorch's memory on " + arena.device.ToString() +
             " is not aligned as kernels need it");
    PlaceInArena(*frame, arena, begin);
  }
  frame->arguments.reserve(arguments_);
  frame->parameters.reserve(parameters_);
  frame->states.reserve(states_);
  for (const PlannedStep& step : steps_) step.step->Prepare(*frame);
  return frame;
}

void Plan::PlaceInArena(Frame& frame, const Arena& arena, void* begin) const {
  for (size_t v = 0; v < values_.size(); ++v) {
    if (values_[v].kind == ValueKind::kArena && values_[v].layout.device == arena.device)
      values_.SetData(frame, v, static_cast<std::byte*>(begin) + values_[v].payload);
  }
}

void Plan::BorrowArena(Frame& frame) const {
  const Arena* const arena = ArenaOf(Device::Host());
  if (arena == nullptr) return;
  frame.arena = HostArena(arena->size_bytes);
  // Mostly it is the block of the call before.
  if (frame.arena.data() == frame.arena_begin && frame.arena_begin != nullptr) return;
  frame.arena_begin = frame.arena.data();
  PlaceInArena(frame, *arena, frame.arena_begin);
}

std::unique_ptr<Frame> Plan::FrameWith(const Binding& binding, const std::vector<Tensor>& inputs) {
  if (static_cast<int64_t>(binding.size()) != constants_) Refuse("the binding is another plan's");
  if (inputs.size() != inputs_) {
    Refuse("the plan takes " + std::to_string(inputs_) + " inputs, not " +
           std::to_string(inputs.size()));
  }
  Streams streams = CurrentStreams(streams_);
  const bool captured = std::any_of(streams.begin(), streams.end(),
                                    [](const auto& stream) { return IsCapturing(stream.second); });
  std::unique_ptr<Frame> frame = captured ? nullptr : frames_.TakeIdle(streams);
  if (!frame) frame = NewFrame(std::move(streams));
  frame->is_captured = captured;
  BorrowArena(*frame);
  BindConstants(*frame, binding);
  BindInputs(*frame, inputs);
  return frame;
}

RunResult Plan::Run(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs,
                    const std::function<void()>& bound) {
  std::unique_ptr<Frame> made = BoundFrame(binding, inputs);
  if (!made) return {{}, RunStatus::kStaleBinding};
  const FramePool::Lease frame(frames_, std::move(made));
  if (bound) bound();
  const RunContext context{values_, *frame, key, binding};
  if (!InTeams([&](const PlannedStep& step) { return RunStep(context, step); }))
    return {{}, RunStatus::kCallbackRaised};
  return {Outputs(*frame), RunStatus::kDone};
}

std::optional<std::vector<Tensor>> Plan::RunInside(const RunContext& caller,
                                                   const std::vector<Tensor>& inputs) {
  const FramePool::Lease frame(frames_, FrameWith(caller.binding, inputs));
  const RunContext context{values_, *frame, caller.plan, caller.binding};
  if (!InTeams([&](const PlannedStep& step) { return RunStep(context, step); }))
    return std::nullopt;
  return Outputs(*frame);
}

void Plan::BindConstants(Frame& frame, const Binding& binding) const {
  for (size_t v = 0; v < values_.size(); ++v) {
    if (values_[v].kind != ValueKind::kConstant) continue;
    void* const data = binding.data(values_[v].payload);
    values_.SetData(
        frame, v, data == nullptr ? data : static_cast<std::byte*>(data) + values_.OffsetBytes(v));
  }
  frame.constants.resize(tensor_constants_.size());
  for (size_t i = 0; i < tensor_constants_.size(); ++i) {
    const size_t v = tensor_constants_[i];
    if (binding.data(values_[v].payload) == nullptr && values_[v].span > 0) {
      frame.tensors[v] = binding.tensor(values_[v].payload);  // only operators know how it lies
      continue;
    }
    // Over its memory, which the guard has just found in its place. Kept: parameters seldom move.
    auto& [data, tensor] = frame.constants[i];
    if (!tensor || data != frame.views[v].data) {
      data = frame.views[v].data;
      tensor = Borrowed(data, values_[v].layout);
    }
    frame.tensors[v] = tensor;
  }
}

void Plan::BindInputs(Frame& frame, const std::vector<Tensor>& inputs) const {
  for (size_t v = 0; v < values_.size(); ++v) {
    const Value& value = values_[v];
    if (value.kind != ValueKind::kInput && value.kind != ValueKind::kRawInput) continue;
    const Tensor& input = inputs[value.payload];
    const Match match = Compare(input, value);
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
    if (value.kind == ValueKind::kInput) values_.SetDataOf(frame, v, *frame.tensors[v]);
  }
}

Tensor Plan::NewTensor(const Value& value) const {
  const size_t size_bytes = value.SizeBytes();
  if (!value.layout.device.is_host || size_bytes <= kLargeBytes) return Empty(value.layout);
  try {
    return Over(kept_->Take(size_bytes), value.layout, kept_);
  } catch (const std::bad_alloc&) {
    return Empty(value.layout);  // throws what says so
  }
}

bool Plan::RunStep(const RunContext& context, const PlannedStep& step) const {
  Frame& frame = context.frame;
  for (const size_t v : step.allocates) {
    frame.tensors[v] = NewTensor(values_[v]);
    values_.SetDataOf(frame, v, *frame.tensors[v]);
  }
  if (step.kernel != nullptr) {
    step.kernel->Call(frame);
  } else if (!step.step->Run(context)) {
    return false;
  }
  for (const size_t v : step.releases) {
    frame.tensors[v].reset();
    for (const size_t alias : values_.aliases(v)) frame.tensors[alias].reset();
  }
  return true;
}

std::vector<Tensor> Plan::Outputs(Frame& frame) const {
  std::vector<Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const size_t value : outputs_) outputs.push_back(values_.TensorOf(frame, value));
  return outputs;
}

}  // namespace torch_hybrid_backend
