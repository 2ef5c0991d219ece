// ProfilerRange: a named range in torch.profiler's timeline, from construction to destruction.
//
// It costs an allocation and a look at the profiler's callbacks: make one only while a profiler is
// on. Ranges of one thread must nest.
//
// Ownership: the range owns its record; it neither copies nor moves.
//
// Failure: nothing throws; a range that PyTorch cannot open is simply not shown.
#ifndef TORCH_HYBRID_BACKEND_PROFILER_RANGE_H_
#define TORCH_HYBRID_BACKEND_PROFILER_RANGE_H_

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <string>

namespace torch_hybrid_backend {

class ProfilerRange {
 public:
  explicit ProfilerRange(const std::string& name);
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
  ~ProfilerRange();

 private:
  AtenRecordFunctionHandle record_ = nullptr;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_PROFILER_RANGE_H_
