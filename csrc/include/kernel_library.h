// Kernel libraries: shared objects exported by TVM, opened once per name, wired to the
// threads of worker_threads.h.
//
// Ownership: every kernel found shares its library. A library is unloaded when it was closed and
// the last plan with a kernel of it is gone; one that nobody closes stays until the process ends.
//
// Failure: everything here throws std::runtime_error with the path, the symbol and the loader's
// reason.
#ifndef TORCH_HYBRID_BACKEND_KERNEL_LIBRARY_H_
#define TORCH_HYBRID_BACKEND_KERNEL_LIBRARY_H_

#include <memory>
#include <string>

#include "kernel_abi.h"

namespace torch_hybrid_backend {

// A kernel and what keeps its code in memory.
struct LoadedKernel {
  KernelFunction function = nullptr;
  std::shared_ptr<void> library;
};

// The kernel `symbol` of the library at `path` (absolute, so that the loader searches nowhere
// else).
LoadedKernel FindKernel(const std::string& path, const std::string& symbol);

// Opens the library, and keeps it open until CloseLibrary.
void OpenLibrary(const std::string& path);

// Forgets the library: it is unloaded with its last kernel. Does nothing where none of that path is
// open.
void CloseLibrary(const std::string& path);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_KERNEL_LIBRARY_H_
