// Plan: the steps of one static graph, built once, then run from any number of threads at once.
//
// Use: construct it from a description, then Run. The description is the JSON text that
// runtime/native/description.py writes:
//
//   {"version": 1,
//    "values": [[kind, payload, dtype, sizes, strides, device, offset], ...],   no offset: 0
//    "steps": [{"kind": ..., ...}, ...],        in order of execution; see src/steps/
//    "ranges": [[first step, name], ...],       what profilers show steps as
//    "arenas": [[device, bytes], ...],
//    "inputs": count, "constants": count, "outputs": values,
//    "plans": [plan, ...]}                      those that control flow runs; absent where it has
//    none
//
// A plan of "plans" has the same members but for "version" and "plans". Its steps run plans that
// come before it in the list. All have the slots of one binding and the functions of one key.
//
// plan_template.h makes plans whose sizes are known only at run time.
//
// On the host a run ends when its work has ended. On another device it ends when its work is queued
// on the caller's current stream: no run waits for a device, but for what operators do themselves.
//
// Ownership: the plan owns its values, steps and idle frames (see frame.h); its kernels
// share their libraries.
//
// Failure: building throws std::runtime_error for another version and for what could never run. Run
// throws std::runtime_error for inputs that do not fit and for a kernel or operator that fails, by
// its name; a stale binding and a callback that raised are statuses, because the first is routine
// and the second has its exception in Python.
#ifndef TORCH_HYBRID_BACKEND_PLAN_H_
#define TORCH_HYBRID_BACKEND_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "binding.h"
#include "frame.h"
#include "host_kernel.h"
#include "step.h"
#include "team.h"
#include "values.h"

namespace torch_hybrid_backend {

// The numbers are those of RunStatus in torch_hybrid_backend/runtime/native/ops.py.
enum class RunStatus : int64_t { kDone = 0, kStaleBinding = 1, kCallbackRaised = 2 };

struct RunResult {
  std::vector<Tensor> outputs;
  RunStatus status;
};

// `nanoseconds`: of each step, where the run is done.
struct TimedResult {
  RunResult result;
  std::vector<int64_t> nanoseconds;
};

inline std::string PathsAsTheyAre(const std::string& name) { return name; }

class Plan {
 public:
  // Kernels are found in libraries at the paths that `library_path` makes of the names in the
  // description.
  explicit Plan(const Json& json, const LibraryPaths& library_path = PathsAsTheyAre)
      : Plan(json, library_path, ReadPlans(json, library_path)) {}
  explicit Plan(std::string_view description, const LibraryPaths& library_path = PathsAsTheyAre)
      : Plan(Json::Parse(description), library_path) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  int64_t constants() const { return constants_; }
  int64_t ArenaBytes() const;  // of all devices; without those of plans that its steps run
  size_t inputs() const { return inputs_; }
  size_t outputs() const { return outputs_.size(); }
  const Layout& OutputLayout(size_t output) const { return values_[outputs_[output]].layout; }
  size_t depth() const { return depth_; }  // of plans within plans; 1 where no step runs one

  // `key` is the plan's handle, by which callbacks find their Python side. `bound` is called once
  // the run has taken its inputs: each is freed behind the last step that reads it, where nobody
  // else holds it then.
  RunResult Run(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs,
                const std::function<void()>& bound = {});

  // A run within a step of another plan's run, with its constants. Nothing where a callback raised.
  std::optional<std::vector<Tensor>> RunInside(const RunContext& caller,
                                               const std::vector<Tensor>& inputs);

  // The two below are torch/plan_profile.cc's: the runner has neither.

  // A run that shows the plan's ranges to PyTorch's profiler, and each kernel inside its range.
  RunResult RunProfiled(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs);

  // A run that also tells what each step took, on the host or on its device, whichever is more.
  // Waits for the devices. `in_teams`: kernels share parallel regions, as in Run; otherwise the
  // time of a kernel includes the start of its own.
  TimedResult Time(int64_t key, const Binding& binding, const std::vector<Tensor>& inputs,
                   bool in_teams);

 private:
  Plan(const Json& json, const LibraryPaths& library_path, const SubPlans& plans);
  static SubPlans ReadPlans(const Json& json, const LibraryPaths& library_path);

  struct PlannedStep {
    std::unique_ptr<Step> step;
    const HostKernel* kernel;       // the step, where it is one: it is called directly
    bool in_team;                   // what Step::InTeam says
    Device device;                  // where its work is
    std::vector<size_t> allocates;  // fresh values first touched here
    std::vector<size_t> releases;   // tensors last touched here
  };
  struct Range {
    size_t first_step;
    std::string name;
  };
  struct Arena {
    Device device;
    int64_t size_bytes;
  };

  void ReadValues(const Json& values);
  void ReadArenas(const Json& arenas, PlanParts& parts);
  void ReadSteps(const Json& steps, PlanParts& parts);
  void CheckValues() const;
  void FindLifetimes();
  void ExpectLargeValues();
  const Arena* ArenaOf(const Device& device) const;

  std::unique_ptr<Frame> NewFrame(Streams streams) const;
  // Null for a stale binding.
  std::unique_ptr<Frame> BoundFrame(const Binding& binding, const std::vector<Tensor>& inputs) {
    return binding.IsStale() ? nullptr : FrameWith(binding, inputs);
  }
  std::unique_ptr<Frame> FrameWith(const Binding& binding, const std::vector<Tensor>& inputs);
  void PlaceInArena(Frame& frame, const Arena& arena, void* begin) const;
  void BorrowArena(Frame& frame) const;
  void BindInputs(Frame& frame, const std::vector<Tensor>& inputs) const;
  void BindConstants(Frame& frame, const Binding& binding) const;
  Tensor NewTensor(const Value& value) const;
  bool RunStep(const RunContext& context, const PlannedStep& step) const;
  // Calls `run` with each step, with those that can share a parallel region inside one, until it
  // returns false.
  template <typename RunOne>
  bool InTeams(const RunOne& run) const;
  bool RunStepsProfiled(const RunContext& context) const;
  std::vector<Tensor> Outputs(Frame& frame) const;

  Values values_;
  std::vector<PlannedStep> steps_;
  std::vector<size_t> tensor_constants_;  // constants that operators take
  std::vector<Range> ranges_;             // in order of their first steps
  std::vector<size_t> outputs_;
  std::vector<Arena> arenas_;
  std::vector<Device> streams_;  // devices whose current stream a frame is for
  size_t arguments_ = 0;
  size_t parameters_ = 0;
  size_t states_ = 0;
  size_t inputs_ = 0;
  int64_t constants_ = 0;
  size_t depth_ = 1;
  std::optional<ArenaPool::Need> host_arena_;
  FramePool frames_;
  std::shared_ptr<KeptBlocks> kept_;  // null where no fresh value is large
};

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

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_PLAN_H_
