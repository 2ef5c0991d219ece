// LibTorch for the runner: libhybrid_runner_torch.so, opened with the first model that has
// operators of PyTorch, and kept by the process.
//
// Failure: throws std::runtime_error that says what is missing and what to do.
#ifndef TORCH_HYBRID_BACKEND_TORCH_LIBRARY_H_
#define TORCH_HYBRID_BACKEND_TORCH_LIBRARY_H_

#include <functional>
#include <string>

#include "torch_functions.h"

namespace torch_hybrid_backend {

// Opens it for a file that was written with `torch` ("2.13.0+cpu"), the only version whose
// operators it may call. `folder`: where libtorch_cpu.so is; "": where the loader looks.
// `operators` names those that the file calls, for errors.
void OpenTorch(const std::string& torch, const std::string& folder,
               const std::function<std::string()>& operators);

// What OpenTorch opened.
const TorchFunctions& Torch();

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_TORCH_LIBRARY_H_
