// The runs of plan.h that measure, or show themselves to PyTorch's profiler.
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "cuda_driver.h"
#include "plan.h"
#include "profiler_range.h"

namespace torch_hybrid_backend {

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

RunResult Plan::RunProfiled(int64_t key, const Binding& binding,
                            const std::vector<Tensor>& inputs) {
  std::unique_ptr<Frame> bound = BoundFrame(binding, inputs);
  if (!bound) return {{}, RunStatus::kStaleBinding};
  const FramePool::Lease frame(frames_, std::move(bound));
  if (!RunStepsProfiled(RunContext{values_, *frame, key, binding}))
    return {{}, RunStatus::kCallbackRaised};
  return {Outputs(*frame), RunStatus::kDone};
}

TimedResult Plan::Time(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs,
                       bool in_teams) {
  std::unique_ptr<Frame> bound = BoundFrame(binding, inputs);
  if (!bound) return {{{}, RunStatus::kStaleBinding}, {}};
  const FramePool::Lease frame(frames_, std::move(bound));
  const RunContext context{values_, *frame, key, binding};
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

}  // namespace torch_hybrid_backend
