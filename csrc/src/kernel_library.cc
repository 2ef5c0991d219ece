#include "kernel_library.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "tvm_backend.h"

namespace torch_hybrid_backend {
namespace {

using MoveFromRaised = decltype(&TVMFFIErrorMoveFromRaised);
using DecRef = decltype(&TVMFFIObjectDecRef);

struct TvmFfi {
  MoveFromRaised move_from_raised = nullptr;
  DecRef dec_ref = nullptr;
};

// Written once by LoadTvmFfi, read by any thread whose kernel failed.
std::atomic<const TvmFfi*> tvm_ffi{nullptr};

std::string LoaderError() {
  const char* reason = dlerror();
  return reason != nullptr ? reason : "unknown reason";
}

// Kernels call their runtime through pointer variables that the library exports and the loader
// fills.
void Point(void* library, const char* variable, void* function) {
  if (auto* slot = static_cast<void**>(dlsym(library, variable))) *slot = function;
}

// What TVM's own loader would also provide and PyTorch's threads cannot: a barrier between tasks
// would deadlock when one thread runs several of them, and calls by name need TVM's registry.
constexpr std::array<const char*, 2> kUnserved = {"__TVMBackendParallelBarrier",
                                                  "__TVMBackendGetFuncFromEnv"};

void* Open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error("cannot open the kernel library " + path + ": " + LoaderError());
  }
  for (const char* variable : kUnserved) {
    if (dlsym(library, variable) != nullptr) {
      throw std::runtime_error("the kernel library " + path + " needs " + (variable + 2) +
                               ", which PyTorch's threads cannot serve");
    }
  }
  Point(library, "__TVMBackendParallelLaunch", reinterpret_cast<void*>(&ParallelLaunch));
  Point(library, "__TVMBackendAllocWorkspace", reinterpret_cast<void*>(&AllocWorkspace));
  Point(library, "__TVMBackendFreeWorkspace", reinterpret_cast<void*>(&FreeWorkspace));
  return library;
}

void* OpenOnce(const std::string& path) {
  // Never destroyed: kernels may still run while the process exits.
  static auto* const mutex = new std::mutex;
  static auto* const libraries = new std::unordered_map<std::string, void*>;
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto found = libraries->find(path);
  if (found != libraries->end()) return found->second;
  void* library = Open(path);
  libraries->emplace(path, library);
  return library;
}

}  // namespace

void LoadTvmFfi(const std::string& path) {
  if (tvm_ffi.load() != nullptr) return;
  // Python may have loaded it already with local visibility; opening it again raises it to global.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw std::runtime_error("cannot open " + path + ": " + LoaderError());
  static TvmFfi functions;
  functions.move_from_raised =
      reinterpret_cast<MoveFromRaised>(dlsym(library, "TVMFFIErrorMoveFromRaised"));
  functions.dec_ref = reinterpret_cast<DecRef>(dlsym(library, "TVMFFIObjectDecRef"));
  if (functions.move_from_raised == nullptr || functions.dec_ref == nullptr) {
    throw std::runtime_error(path + " is not a tvm_ffi library this runtime knows");
  }
  tvm_ffi.store(&functions);
}

KernelFunction FindKernel(const std::string& path, const std::string& symbol) {
  void* library = OpenOnce(path);
  void* function = dlsym(library, ("__tvm_ffi_" + symbol).c_str());
  if (function == nullptr) {
    throw std::runtime_error("the kernel library " + path + " has no kernel \"" + symbol + "\"");
  }
  return reinterpret_cast<KernelFunction>(function);
}

std::string TakeKernelError() {
  const TvmFfi* functions = tvm_ffi.load();
  if (functions == nullptr) return "";
  TVMFFIObjectHandle error = nullptr;
  functions->move_from_raised(&error);
  if (error == nullptr) return "";
  // An error object is its header followed by its cell.
  const auto* cell = reinterpret_cast<const TVMFFIErrorCell*>(static_cast<const char*>(error) +
                                                              sizeof(TVMFFIObject));
  std::string message(cell->message.data, cell->message.size);
  functions->dec_ref(error);
  return message;
}

}  // namespace torch_hybrid_backend
