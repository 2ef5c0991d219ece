// Kernel libraries: shared objects exported by TVM, opened once per name, wired to PyTorch's
// threads.
//
// Ownership: every kernel found shares its library. A library is unloaded when it was closed and
// the last plan with a kernel of it is gone; one that nobody closes stays until the process ends.
//
// Failure: everything here throws std::runtime_error with the path, the symbol and the loader's
// reason.
#ifndef TORCH_HYBRID_BACKEND_KERNEL_LIBRARY_H_
#define TORCH_HYBRID_BACKEND_KERNEL_LIBRARY_H_

#include <tvm/ffi/c_api.h>

#include <memory>
#include <string>

namespace torch_hybrid_backend {

// The calling convention of TVM's exported functions: returns 0, or non-zero with an error left in
// tvm_ffi.
using KernelFunction = int (*)(void* self, const TVMFFIAny* arguments, int32_t count,
                               TVMFFIAny* result);

// Makes libtvm_ffi's symbols visible to kernels, which call it to report errors without naming it
// as a dependency. Must come before the first FindKernel; repeating it is harmless.
void LoadTvmFfi(const std::string& path);

// A kernel and what keeps its code in memory.
struct LoadedKernel {
  KernelFunction function = nullptr;
  std::shared_ptr<void> library;
};

// The kernel `symbol` of the library at `path` (absolute, so that the loader searches nowhere
// else).
LoadedKernel FindKernel(const std::string& path, const std::string& symbol);

// Forgets the library: it is unloaded with its last kernel. Does nothing where none of that path is
// open.
void CloseLibrary(const std::string& path);

// The message of the error that the last failing kernel of this thread left, or "" where it left
// none.
std::string TakeKernelError();

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_KERNEL_LIBRARY_H_
