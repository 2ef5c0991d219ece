// TorchFunctions: what libhybrid_runner_torch.so does for libhybrid_runner.so, which knows no
// LibTorch: a table of C functions, so that neither throws into the other and each may have a C++
// library of its own.
//
// Use: hybrid_torch_functions of the opened library gives the table.
//
// Ownership: see HandedTensor. The library stays in the process once it was used.
//
// Failure: a function gives NULL or a number other than 0; `error` then has the reason.
#ifndef TORCH_HYBRID_BACKEND_TORCH_FUNCTIONS_H_
#define TORCH_HYBRID_BACKEND_TORCH_FUNCTIONS_H_

#include <cstddef>
#include <cstdint>

namespace torch_hybrid_backend {

// A tensor of the host, handed from one library to the other. Whoever is handed it calls
// `release(owner)` once, when nothing uses the memory any longer. `release` is null for memory that
// is borrowed for the call.
struct HandedTensor {
  void* data;
  const int64_t* sizes;  // as `strides`, in elements, and borrowed
  const int64_t* strides;
  int32_t dimensions;  // -1: there is no tensor, as the operator left this result undefined
  int32_t dtype;       // the number of a Dtype
  void* owner;
  void (*release)(void* owner);
};

// Takes tensor after tensor of the results, in order; `result` is the number of one, whose list may
// have several. Must not throw.
using TakeTensor = void (*)(void* context, size_t result, const HandedTensor* tensor);

struct TorchFunctions {
  // Raised whenever this file changes; the two libraries must have the same.
  static constexpr uint32_t kVersion = 1;
  uint32_t version;

  // Of LibTorch: 0x020d00... is 2.13.0.
  uint64_t torch_version;

  // An operator of a step's description, JSON of that length.
  void* (*make)(const char* description, size_t length);
  void (*free)(void* made);
  // Calls an operator with these tensors, on so many threads. All tensors are released, also where
  // it fails.
  int32_t (*call)(const void* made, const HandedTensor* tensors, size_t count, int32_t threads,
                  TakeTensor take, void* context);

  // Of the calling thread's last failure.
  const char* (*error)();
};

}  // namespace torch_hybrid_backend

extern "C" __attribute__((visibility("default"))) const torch_hybrid_backend::TorchFunctions*
hybrid_torch_functions();

#endif  // TORCH_HYBRID_BACKEND_TORCH_FUNCTIONS_H_
