// Plan: the steps of one static graph, built once, then run from any number of threads at once.
//
// Use: AddValue / AddKernel / AddOperator / AddCallback / AddCopy / AddRange in execution order,
// Seal once, then Run.
//
// Ownership: the plan owns its values, steps and idle frames (see frame.h); its kernels
// share their libraries.
//
// Failure: building throws std::runtime_error for what could never run. Run throws
// std::runtime_error for inputs that do not fit and for a kernel or operator that fails, by its
// name; a stale binding and a callback that raised are statuses, because the first is routine and
// the second has its exception in Python.
#ifndef TORCH_HYBRID_BACKEND_PLAN_H_
#define TORCH_HYBRID_BACKEND_PLAN_H_

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "binding.h"
#include "frame.h"
#include "kernel_library.h"
#include "operator_call.h"
#include "value.h"

namespace torch_hybrid_backend {

// The numbers are those of RunStatus in torch_hybrid_backend/runtime/native/ops.py.
enum class RunStatus : int64_t { kDone = 0, kStaleBinding = 1, kCallbackRaised = 2 };

struct RunResult {
  std::vector<torch::stable::Tensor> outputs;
  RunStatus status;
};

class Plan {
 public:
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  size_t AddValue(ValueKind kind, int64_t payload, Layout layout);
  // `sizes` are further arguments, after the values: sizes that the kernel takes at run time.
  void AddKernel(const std::string& library, const std::string& symbol,
                 const std::vector<int64_t>& values, std::vector<int64_t> sizes);
  // `tensors` are what the call takes, constants among them; its result becomes `result`, a
  // returned value.
  void AddOperator(OperatorCall call, const std::vector<int64_t>& tensors, int64_t result);
  // Runs segment number `segment` of the plan's Python side.
  void AddCallback(int64_t segment, const std::vector<int64_t>& inputs,
                   const std::vector<int64_t>& outputs);
  // Copies between values of one shape and possibly different strides.
  void AddCopy(int64_t source, int64_t destination);
  // The steps added from here to the next AddRange, or the end, are shown as `name` by a profiler.
  void AddRange(std::string name);
  void Seal(int64_t inputs, int64_t constants, int64_t arena_bytes,
            const std::vector<int64_t>& outputs);

  int64_t constants() const { return constants_; }

  // `key` is the plan's handle, by which callbacks find their Python side. `profiled`: show ranges,
  // and each kernel inside its range.
  RunResult Run(int64_t key, const Binding& binding,
                const std::vector<torch::stable::Tensor>& inputs, bool profiled);

  // A run whose outputs are dropped: the nanoseconds that each step took. Empty where Run would
  // return another status than kDone.
  std::vector<int64_t> Time(int64_t key, const Binding& binding,
                            const std::vector<torch::stable::Tensor>& inputs);

 private:
  struct Kernel {
    KernelFunction function;
    std::shared_ptr<void> library;  // keeps the function in memory
    std::string symbol;
    size_t first_argument;
    std::vector<size_t> values;
    std::vector<int64_t> sizes;

    size_t arguments() const { return values.size() + sizes.size(); }
  };
  struct Operator {
    OperatorCall call;
    std::vector<size_t> tensors;
    size_t result;
  };
  struct Callback {
    int64_t segment;
    std::vector<size_t> inputs;
    std::vector<size_t> outputs;
  };
  struct Copy {
    size_t source;
    size_t destination;
  };
  struct Range {
    size_t first_step;
    std::string name;
  };
  struct Step {
    std::variant<Kernel, Operator, Callback, Copy> action;
    std::vector<size_t> allocates;  // fresh values first touched here
    std::vector<size_t> releases;   // tensors last touched here
  };

  size_t Checked(int64_t value) const;
  std::vector<size_t> Checked(const std::vector<int64_t>& values) const;
  void RequireTensor(size_t value, const char* user) const;
  static std::vector<size_t> Touched(const Step& step);
  void FindLifetimes();
  std::unique_ptr<Frame> NewFrame() const;

  std::unique_ptr<Frame> BoundFrame(const Binding& binding,
                                    const std::vector<torch::stable::Tensor>& inputs);
  void BindInputs(Frame& frame, const std::vector<torch::stable::Tensor>& inputs) const;
  void BindConstants(Frame& frame, const Binding& binding) const;
  void SetData(Frame& frame, size_t root, void* data) const;
  const torch::stable::Tensor& TensorOf(Frame& frame, size_t value) const;
  void RunKernel(Frame& frame, const Kernel& kernel) const;
  void RunOperator(Frame& frame, const Operator& step) const;
  void Receive(Frame& frame, size_t value, torch::stable::Tensor tensor,
               const std::string& from) const;
  bool RunCallback(Frame& frame, int64_t key, const Callback& callback) const;
  static size_t SizeBytes(const Value& value);
  torch::stable::Tensor NewTensor(const Value& value) const;
  bool RunStep(Frame& frame, int64_t key, const Step& step) const;
  bool RunSteps(Frame& frame, int64_t key) const;
  bool RunStepsProfiled(Frame& frame, int64_t key) const;
  std::vector<torch::stable::Tensor> Outputs(Frame& frame) const;

  std::vector<Value> values_;
  std::vector<std::vector<size_t>> aliases_;  // of each root
  std::vector<Step> steps_;
  std::vector<size_t> tensor_constants_;  // constants that operators take
  std::vector<Range> ranges_;             // in order of their first steps
  std::vector<size_t> outputs_;
  size_t arguments_ = 0;
  size_t inputs_ = 0;
  int64_t constants_ = 0;
  size_t arena_bytes_ = 0;
  bool sealed_ = false;
  FramePool frames_;
  std::shared_ptr<KeptBlocks> kept_;  // null where no fresh value is large
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_PLAN_H_
