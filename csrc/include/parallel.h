// ParallelFor: a loop on the threads of worker_threads.h whose body may throw.
//
// In `_runtime.so` they are PyTorch's. An exception must not pass through libtorch: it would lose
// its type in the C interface, and may be of another C++ runtime library than libtorch's (`make
// wheel` links one of its own).
#ifndef TORCH_HYBRID_BACKEND_PARALLEL_H_
#define TORCH_HYBRID_BACKEND_PARALLEL_H_

#include <atomic>
#include <cstdint>
#include <exception>

#include "worker_threads.h"

namespace torch_hybrid_backend {

// Calls `function(begin, end)` for parts of [begin, end) of at least `grain`, on all threads.
// Throws what the first call threw that did, after all have ended.
template <typename Function>
void ParallelFor(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  std::atomic_flag has_failed;
  std::exception_ptr failure;
  RunParts(begin, end, grain, [&](int64_t first, int64_t last) {
    try {
      function(first, last);
    } catch (...) {
      if (!has_failed.test_and_set()) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_PARALLEL_H_
