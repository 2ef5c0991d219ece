// The running half of plan.h; plan.cc builds.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cuda_driver.h"
#include "plan.h"
#include "profiler_range.h"
#include "team.h"

namespace torch_hybrid_backend {
namespace {

using torch::stable::Tensor;

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

Streams CurrentStreams(const std::vector<Device>& devices) {
  Streams streams;
  streams.reserve(devices.size());
  for (const Device& device : devices) streams.emplace_back(device, CurrentStream(device));
  return streams;
}

AlignedBlock HostArena(size_t size_bytes) {
  try {
    return AlignedBlock(size_bytes);
  } catch (const std::bad_alloc&) {
    if (!KeptBlocks::FreeIdle())
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
    char* begin = nullptr;
    if (arena.device.is_host) {
      frame->arena = HostArena(arena.size_bytes);
      begin = static_cast<char*>(frame->arena.data());
    } else {
      // On the caller's current stream, for which the frame is kept.
      frame->device_arenas.push_back(Empty(
          Layout{torch::headeronly::ScalarType::Byte, {arena.size_bytes}, {1}, arena.device}));
      begin = static_cast<char*>(frame->device_arenas.back().data_ptr());
      if (reinterpret_cast<uintptr_t>(begin) % kDeviceAlignment != 0)
        Refuse("PyTorch's memory on " + arena.device.ToString() +
               " is not aligned as kernels need it");
    }
    for (size_t v = 0; v < values_.size(); ++v) {
      if (values_[v].kind == ValueKind::kArena && values_[v].layout.device == arena.device)
        values_.SetData(*frame, v, begin + values_[v].payload);
    }
  }
  frame->arguments.reserve(arguments_);
  frame->parameters.reserve(parameters_);
  frame->graphs.reserve(graphs_);
  for (const PlannedStep& step : steps_) step.step->Prepare(*frame);
  return frame;
}

std::unique_ptr<Frame> Plan::BoundFrame(const Binding& binding, const std::vector<Tensor>& inputs) {
  if (static_cast<int64_t>(binding.size()) != constants_) Refuse("the binding is another plan's");
  if (inputs.size() != inputs_) {
    Refuse("the plan takes " + std::to_string(inputs_) + " inputs, not " +
           std::to_string(inputs.size()));
  }
  if (binding.IsStale()) return nullptr;
  Streams streams = CurrentStreams(streams_);
  const bool captured = std::any_of(streams.begin(), streams.end(),
                                    [](const auto& stream) { return IsCapturing(stream.second); });
  std::unique_ptr<Frame> frame = captured ? nullptr : frames_.TakeIdle(streams);
  if (!frame) frame = NewFrame(std::move(streams));
  frame->is_captured = captured;
  BindConstants(*frame, binding);
  BindInputs(*frame, inputs);
  return frame;
}

template <typename RunOne>
bool Plan::InTeams(const RunOne& run) const {
  const auto in_team = [](const PlannedStep& step) { return step.in_team; };
  for (auto step = steps_.begin(); step != steps_.end();) {
    // Other steps start parallel regions of their own.
    const auto end = std::find_if_not(step, steps_.end(), in_team);
    const auto kernels = std::count_if(step, end, [](const auto& each) { return each.kernel; });
    const auto checks = end - step - kernels;
    // What a kernel and the short one of its flag do is not worth the start of a team.
    if (kernels - checks > 1) {
      RunInTeam([&] {
        for (; step != end; ++step) run(*step);
      });
    } else if (!run(*step++)) {
      return false;
    }
  }
  return true;
}

TimedResult Plan::Time(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs,
                       bool in_teams) {
  std::unique_ptr<Frame> bound = BoundFrame(binding, inputs);
  if (!bound) return {{{}, RunStatus::kStaleBinding}, {}};
  const FramePool::Lease frame(frames_, std::move(bound));
  const RunContext context{values_, *frame, key};
  std::vector<int64_t> times;
  times.reserve(steps_.size());
  // Of one device, as a program is: on others only the host's time is known.
  const auto elsewhere = std::find_if(steps_.begin(), steps_.end(),
                                      [](const PlannedStep& step) { return step.device.IsCuda(); });
  std::optional<CudaEvents> events;
  if (elsewhere != steps_.end())
    events.emplace(elsewhere->device.index, CurrentStream(elsewhere->device));
  if (events) events->Mark();
  const auto timed = [&](const PlannedStep& step) {
    const auto start = std::chrono::steady_clock::now();
    if (!RunStep(context, step)) return false;
    const auto spent = std::chrono::steady_clock::now() - start;
    times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
    if (events) events->Mark();
    return true;
  };
  if (!(in_teams ? InTeams(timed) : std::all_of(steps_.begin(), steps_.end(), timed)))
    return {{{}, RunStatus::kCallbackRaised}, {}};
  if (events) {
    const std::vector<int64_t> on_device = events->Nanoseconds();
    for (size_t s = 0; s < times.size(); ++s) times[s] = std::max(times[s], on_device[s]);
  }
  return {{Outputs(*frame), RunStatus::kDone}, std::move(times)};
}

RunResult Plan::Run(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs,
                    bool profiled) {
  std::unique_ptr<Frame> bound = BoundFrame(binding, inputs);
  if (!bound) return {{}, RunStatus::kStaleBinding};
  const FramePool::Lease frame(frames_, std::move(bound));
  const RunContext context{values_, *frame, key};
  const bool done = profiled
                        ? RunStepsProfiled(context)
                        : InTeams([&](const PlannedStep& step) { return RunStep(context, step); });
  if (!done) return {{}, RunStatus::kCallbackRaised};
  return {Outputs(*frame), RunStatus::kDone};
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

bool Plan::RunStepsProfiled(const RunContext& context) const {
  std::optional<ProfilerRange> range;
  size_t next = 0;
  for (size_t s = 0; s < steps_.size(); ++s) {
    for (; next < ranges_.size() && ranges_[next].first_step <= s; ++next) {
      range.reset();  // ends before the next one begins: ranges of one thread nest
      range.emplace(ranges_[next].name);
    }
    std::optional<ProfilerRange> inner;
    if (const std::string title = steps_[s].step->Title(); !title.empty()) inner.emplace(title);
    if (!RunStep(context, steps_[s])) return false;
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
