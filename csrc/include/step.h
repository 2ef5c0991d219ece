// Step: one thing that a plan does in each call. Each kind is a class in src/steps/ or
// torch/steps/, which a description of that kind makes (MakeStep), and which a class in
// core/program.py describes.
//
// Ownership: the plan owns its steps. A step holds nothing of a call: that is in the frame.
//
// Failure: making and preparing a step throw std::runtime_error for what could never run; Run
// throws it for what fails, by the step's name.
#ifndef TORCH_HYBRID_BACKEND_STEP_H_
#define TORCH_HYBRID_BACKEND_STEP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "frame.h"
#include "json.h"
#include "values.h"

namespace torch_hybrid_backend {

// A running call, as its steps see it. `plan`: the handle by which callbacks find their Python
// side.
struct RunContext {
  const Values& values;
  Frame& frame;
  int64_t plan;
};

class Step {
 public:
  Step() = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  virtual ~Step() = default;

  // The values that it reads or writes.
  virtual std::vector<size_t> Touched() const = 0;
  // Adds its part to the tables of a new frame, whose views have their final addresses.
  virtual void Prepare(Frame&) const {}
  // False where a callback raised: its exception waits on the Python side.
  virtual bool Run(const RunContext& context) const = 0;
  // What profilers show for it alone; nothing where it shows itself.
  virtual std::string Title() const { return ""; }
  // Whether it may run between kernels that share one parallel region (team.h). All others start
  // parallel regions of their own.
  virtual bool InTeam() const { return false; }
};

// From the name of a library in a description to its path.
using LibraryPaths = std::function<std::string(const std::string& name)>;

// A plan while its steps are made: what they need of it.
struct PlanParts {
  Values& values;
  // Of the step that is made: where its kernels run.
  Device device;
  // Entries of the frames' tables that steps made before take.
  size_t arguments = 0;
  size_t parameters = 0;
  size_t states = 0;
  // By value, of roots: whether steps made before use it.
  std::vector<bool> touched;
  // Devices other than the host on which steps need the caller's stream, each once.
  std::vector<Device> streams;
  // Constants that steps read as tensors.
  std::vector<size_t> tensor_constants;
  // The path by which the loader opens the library that a kernel's step names.
  LibraryPaths library_path;

  // A value that a step reads as a tensor; constants are allowed where `constants`.
  size_t Tensor(int64_t value, const char* user, bool constants);
  // A value that a step fills with a new tensor in each call. `user`: "an operator".
  size_t Returned(int64_t value, const char* user);
  // Values whose addresses a step is given, on its device.
  std::vector<size_t> Addressed(const std::vector<int64_t>& numbers, const char* user);
  // The position of the device's stream in the frames' streams.
  size_t StreamOf(const Device& device);
};

// The step that a description stands for. Throws for a kind that this build does not know.
std::unique_ptr<Step> MakeStep(const Json& description, PlanParts& plan);

// A kind of step, and the function that makes one.
struct StepKind {
  std::string_view name;
  std::unique_ptr<Step> (*make)(const Json& description, PlanParts& plan);
};

// Each in its file in src/steps/.
std::unique_ptr<Step> MakeHostKernel(const Json& description, PlanParts& plan);
std::unique_ptr<Step> MakeOperatorCall(const Json& description, PlanParts& plan);
std::unique_ptr<Step> MakeCopy(const Json& description, PlanParts& plan);
std::unique_ptr<Step> MakeCheck(const Json& description, PlanParts& plan);

// The kinds that need LibTorch, Python or a GPU: torch/steps/ has them. In the runner they refuse
// (runner/steps.cc).
std::span<const StepKind> OtherStepKinds();

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_STEP_H_
