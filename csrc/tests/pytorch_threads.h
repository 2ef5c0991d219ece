// PyTorch's threads for tests without LibTorch, on std::thread: the thread sanitiser understands
// those, but would report every wait at a barrier of libgomp, which is not instrumented.
//
// As in PyTorch: the calling thread takes the first part of the range; one part, or a call inside
// another's region, runs on the calling thread; what a part throws becomes an error code.
#ifndef TORCH_HYBRID_BACKEND_TESTS_PYTORCH_THREADS_H_
#define TORCH_HYBRID_BACKEND_TESTS_PYTORCH_THREADS_H_

#include <atomic>

// What torch.set_num_threads sets, and how many of these a region gets: a loaded system gives
// fewer.
inline std::atomic<int> pytorch_threads{2};
inline std::atomic<int> most_provided{1 << 20};

#endif  // TORCH_HYBRID_BACKEND_TESTS_PYTORCH_THREADS_H_
