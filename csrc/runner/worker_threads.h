// The runner's threads, for parallel.h: those of GCC's OpenMP library, which is opened with the
// first model that wants more than one thread. `_runtime.so` has another header of this name.
//
// Failure: ThreadsFor throws std::runtime_error; nothing else throws.
#ifndef TORCH_HYBRID_BACKEND_WORKER_THREADS_H_
#define TORCH_HYBRID_BACKEND_WORKER_THREADS_H_

#include <cstdint>

namespace torch_hybrid_backend {

// The threads of a model's calls. 0 stands for as many as OMP_NUM_THREADS says, up to the bound of
// threads; without it, as many as the process may use processors. Throws for a number below 0 or
// above the bound. Throws where there can be no more than one, as OpenMP's library is missing, and
// 1 is not what is wanted.
int ThreadsFor(int wanted);

// Threads of a parallel loop that the calling thread starts now: 1 inside another such loop.
int ThreadCount();

// Sets the calling thread's ThreadCount while it lives.
class ThreadsOfCall {
 public:
  explicit ThreadsOfCall(int threads);
  ThreadsOfCall(const ThreadsOfCall&) = delete;
  ThreadsOfCall& operator=(const ThreadsOfCall&) = delete;
  ~ThreadsOfCall();

 private:
  const int before_;
};

using PartFunction = void (*)(const void* function, int64_t begin, int64_t end);
void RunPartsOf(int64_t begin, int64_t end, int64_t grain, PartFunction part, const void* function);

// Calls `function(begin, end)`, which must not throw, for parts of [begin, end) of at least
// `grain`: serially inside another such loop. Returns when all have ended.
template <typename Function>
void RunParts(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  RunPartsOf(
      begin, end, grain,
      [](const void* erased, int64_t first, int64_t last) {
        (*static_cast<const Function*>(erased))(first, last);
      },
      &function);
}

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_WORKER_THREADS_H_
