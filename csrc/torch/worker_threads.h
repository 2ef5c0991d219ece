// PyTorch's threads, for parallel.h. The runner has another header of this name.
//
// Failure: throws std::runtime_error with LibTorch's reason.
#ifndef TORCH_HYBRID_BACKEND_WORKER_THREADS_H_
#define TORCH_HYBRID_BACKEND_WORKER_THREADS_H_

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace torch_hybrid_backend {

inline int ThreadCount() { return static_cast<int>(torch::stable::get_num_threads()); }

// Calls `function(begin, end)`, which must not throw, for parts of [begin, end) of at least
// `grain`: serially inside another such loop. Returns when all have ended.
template <typename Function>
void RunParts(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  torch::stable::parallel_for(begin, end, grain, function);
}

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_WORKER_THREADS_H_
