// AnyInParallel: std::any_of over numbers, on PyTorch's threads.
#ifndef TORCH_HYBRID_BACKEND_ANY_IN_PARALLEL_H_
#define TORCH_HYBRID_BACKEND_ANY_IN_PARALLEL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "parallel.h"

namespace torch_hybrid_backend {

// Whether `holds(i)` for any i from 0 up to, not including, `count`; on all threads where that is
// more than one task of `per_task`.
template <typename Holds>
bool AnyInParallel(size_t count, int64_t per_task, const Holds& holds) {
  std::atomic<bool> found{false};
  ParallelFor(0, static_cast<int64_t>(count), per_task, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && !found.load(std::memory_order_relaxed); ++i) {
      if (holds(static_cast<size_t>(i))) found.store(true, std::memory_order_relaxed);
    }
  });
  return found.load(std::memory_order_relaxed);
}

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ANY_IN_PARALLEL_H_
