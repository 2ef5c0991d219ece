#include "kernel_library.h"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tvm_backend.h"

namespace torch_hybrid_backend {
namespace {

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

// The loader keeps the name that a library was opened under. The number of a descriptor may be that
// of another file by now, which backtraces of TVM and PyTorch would read for the library's: its
// name becomes that of no file.
void ForgetDescriptor(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 &&
      std::string_view(map->l_name).starts_with("/proc/self/fd/")) {
    map->l_name[0] = '?';
  }
}

std::shared_ptr<void> Open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error("cannot open the kernel library " + path + ": " + LoaderError());
  }
  std::shared_ptr<void> owner(library, Unload{});
  ForgetDescriptor(library);
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

LoadedKernel FindKernel(const std::string& path, const std::string& symbol) {
  std::shared_ptr<void> library = OpenOnce(path);
  void* function = dlsym(library.get(), (std::string(kSymbolPrefix) + symbol).c_str());
  if (function == nullptr) {
    throw std::runtime_error("the kernel library " + path + " has no kernel \"" + symbol + "\"");
  }
  return {reinterpret_cast<KernelFunction>(function), std::move(library)};
}

void OpenLibrary(const std::string& path) { OpenOnce(path); }

void CloseLibrary(const std::string& path) {
  std::shared_ptr<void> last;  // unloaded after the lock is given back
  Libraries& libraries = OpenLibraries();
  const std::lock_guard<std::mutex> lock(libraries.mutex);
  const auto found = libraries.by_path.find(path);
  if (found == libraries.by_path.end()) return;
  last = std::move(found->second);
  libraries.by_path.erase(found);
}

}  // namespace torch_hybrid_backend
