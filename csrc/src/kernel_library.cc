#include "kernel_library.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

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

struct Unload {
  void operator()(void* library) const { dlclose(library); }
};

std::shared_ptr<void> Open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error("cannot open the kernel library " + path + ": " + LoaderError());
  }
  std::shared_ptr<void> owner(library, Unload{});
  for (const char* variable : kUnserved) {
    if (dlsym(library, variable) != nullptr) {
      throw std::runtime_error("the kernel library " + path + " needs " + (variable + 2) +
                               ", which PyTorch's threads cannot serve");
    }
  }
  Point(library, "__TVMBackendParallelLaunch", reinterpret_cast<void*>(&ParallelLaunch));
  Point(library, "__TVMBackendAllocWorkspace", reinterpret_cast<void*>(&AllocWorkspace));
  Point(library, "__TVMBackendFreeWorkspace", reinterpret_cast<void*>(&FreeWorkspace));
  return owner;
}

struct Libraries {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<void>> by_path;
};

Libraries& OpenLibraries() {
  // Never destroyed: kernels may still run while the process exits.
  static auto* const libraries = new Libraries;
  return *libraries;
}

std::shared_ptr<void> OpenOnce(const std::string& path) {
  Libraries& libraries = OpenLibraries();
  const std::lock_guard<std::mutex> lock(libraries.mutex);
  std::shared_ptr<void>& library = libraries.by_path[path];
  if (library == nullptr) {
    try {
      library = Open(path);
    } catch (...) {
      libraries.by_path.erase(path);
      throw;
    }
  }
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

LoadedKernel FindKernel(const std::string& path, const std::string& symbol) {
  std::shared_ptr<void> library = OpenOnce(path);
  void* function = dlsym(library.get(), ("__tvm_ffi_" + symbol).c_str());
  if (function == nullptr) {
    throw std::runtime_error("the kernel library " + path + " has no kernel \"" + symbol + "\"");
  }
  return {reinterpret_cast<KernelFunction>(function), std::move(library)};
}

void CloseLibrary(const std::string& path) {
  std::shared_ptr<void> last;  // unloaded after the lock is given back
  Libraries& libraries = OpenLibraries();
  const std::lock_guard<std::mutex> lock(libraries.mutex);
  const auto found = libraries.by_path.find(path);
  if (found == libraries.by_path.end()) return;
  last = std::move(found->second);
  libraries.by_path.erase(found);
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
