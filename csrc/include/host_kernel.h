// HostKernel: a step that calls a kernel of a library, on the CPU.
//
// It is declared here, unlike other steps, because plans call it directly: between the kernels of a
// team nothing may be slow.
#ifndef TORCH_HYBRID_BACKEND_HOST_KERNEL_H_
#define TORCH_HYBRID_BACKEND_HOST_KERNEL_H_

#include "kernel_library.h"
#include "step.h"

namespace torch_hybrid_backend {

class HostKernel final : public Step {
 public:
  HostKernel(LoadedKernel kernel, std::string symbol, std::vector<size_t> values,
             std::vector<int64_t> sizes, PlanParts& plan);

  std::vector<size_t> Touched() const override { return values_; }
  void Prepare(Frame& frame) const override;
  bool Run(const RunContext& context) const override {
    Call(context.frame);
    return true;
  }
  std::string Title() const override { return symbol_; }
  bool InTeam() const override { return true; }

  void Call(Frame& frame) const {
    TVMFFIAny result{};
    const int status = function_(nullptr, frame.arguments.data() + first_argument_,
                                 static_cast<int32_t>(arguments()), &result);
    if (status != 0) Fail(status);
  }

 private:
  size_t arguments() const { return values_.size() + sizes_.size(); }
  [[noreturn]] void Fail(int status) const;

  KernelFunction function_;
  std::shared_ptr<void> library_;  // keeps the function in memory
  std::string symbol_;
  size_t first_argument_;
  std::vector<size_t> values_;
  std::vector<int64_t> sizes_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_HOST_KERNEL_H_
