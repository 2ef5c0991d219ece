// CudaEvents: how long the work of several steps took on a GPU's stream, one after the other.
//
// Use: Mark before the first step and after each; then Nanoseconds, which waits for the last mark.
//
// It has run on no GPU yet: csrc/tests/test_device_launch.cc tries it against a driver whose work
// takes made-up times.
//
// Ownership: owns its events.
//
// Failure: Mark and Nanoseconds throw std::runtime_error where the driver refuses, or there is
// none.
#ifndef TORCH_HYBRID_BACKEND_CUDA_EVENTS_H_
#define TORCH_HYBRID_BACKEND_CUDA_EVENTS_H_

#include <cstdint>
#include <vector>

namespace torch_hybrid_backend {

class CudaEvents {
 public:
  // `stream`: of that GPU.
  CudaEvents(int32_t device, void* stream) : device_(device), stream_(stream) {}
  CudaEvents(const CudaEvents&) = delete;
  CudaEvents& operator=(const CudaEvents&) = delete;
  ~CudaEvents();

  void Mark();
  // Between each mark and the next one: one number fewer than there are marks. An event tells its
  // time to about half a microsecond.
  std::vector<int64_t> Nanoseconds() const;

 private:
  int32_t device_;
  void* stream_;
  std::vector<void*> events_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_CUDA_EVENTS_H_
