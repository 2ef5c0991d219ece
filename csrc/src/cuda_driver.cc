#include "cuda_driver.h"

#include <dlfcn.h>

#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace torch_hybrid_backend {
namespace {

// As cuda.h declares them: a status of 0 is success, handles are pointers.
using Status = int;
constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
// What a kernel may have without asking.
constexpr uint32_t kSharedBytesForAll = 48 << 10;

struct Driver {
  Status (*init)(unsigned flags);
  Status (*device_get)(int* device, int ordinal);
  Status (*primary_context_retain)(void** context, int device);
  Status (*context_get_current)(void** context);
  Status (*context_push)(void* context);
  Status (*context_pop)(void** context);
  Status (*module_load_data)(void** module, const void* image);
  Status (*module_get_function)(void** function, void* module, const char* name);
  Status (*function_set_attribute)(void* function, int attribute, int value);
  Status (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, void* stream, void** parameters, void** extra);
  Status (*error_name)(Status status, const char** name);
};

template <typename Function>
void Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr)
    throw std::runtime_error(std::string("libcuda.so.1 has no ") + name +
                             ": the driver is too old");
}

Driver OpenDriver() {
  // Never closed: PyTorch uses the same one.
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error("kernels cannot be launched on a GPU without NVIDIA's driver: " +
                             std::string(dlerror()));
  }
  Driver driver{};
  Find(library, "cuInit", driver.init);
  Find(library, "cuDeviceGet", driver.device_get);
  Find(library, "cuDevicePrimaryCtxRetain", driver.primary_context_retain);
  Find(library, "cuCtxGetCurrent", driver.context_get_current);
  Find(library, "cuCtxPushCurrent_v2", driver.context_push);
  Find(library, "cuCtxPopCurrent_v2", driver.context_pop);
  Find(library, "cuModuleLoadData", driver.module_load_data);
  Find(library, "cuModuleGetFunction", driver.module_get_function);
  Find(library, "cuFuncSetAttribute", driver.function_set_attribute);
  Find(library, "cuLaunchKernel", driver.launch_kernel);
  Find(library, "cuGetErrorName", driver.error_name);
  return driver;
}

const Driver& Cuda() {
  static const Driver driver = OpenDriver();
  return driver;
}

void Check(Status status, const std::string& what) {
  if (status == 0) return;
  const char* name = nullptr;
  Cuda().error_name(status, &name);
  throw std::runtime_error(what + " failed: " + (name != nullptr ? name : "unknown error") + " (" +
                           std::to_string(status) + ")");
}

// Makes a context the calling thread's, where it is not.
class InContext {
 public:
  explicit InContext(void* context) {
    void* current = nullptr;
    Check(Cuda().context_get_current(&current), "asking for the thread's CUDA context");
    if (current == context) return;
    Check(Cuda().context_push(context), "entering a CUDA context");
    pushed_ = true;
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  ~InContext() {
    void* popped = nullptr;
    if (pushed_) Cuda().context_pop(&popped);
  }

 private:
  bool pushed_ = false;
};

struct Modules {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const ModuleImage>> by_path;
  std::map<int32_t, void*> contexts;
  // Weak: an image that is gone may be followed by another at its address.
  std::map<std::pair<const ModuleImage*, int32_t>,
           std::pair<std::weak_ptr<const ModuleImage>, void*>>
      loaded;
};

Modules& AllModules() {
  // Never destroyed: launches may still be queued while the process exits.
  static auto* const modules = new Modules;
  return *modules;
}

void* ContextOf(Modules& modules, int32_t device) {
  void*& context = modules.contexts[device];
  if (context == nullptr) {
    const std::string gpu = "GPU " + std::to_string(device);
    Check(Cuda().init(0), "starting the CUDA driver");
    int handle = 0;
    Check(Cuda().device_get(&handle, device), "finding " + gpu);
    Check(Cuda().primary_context_retain(&context, handle), "the context of " + gpu);
  }
  return context;
}

}  // namespace

std::shared_ptr<const ModuleImage> OpenModule(const std::string& path) {
  Modules& modules = AllModules();
  const std::lock_guard<std::mutex> lock(modules.mutex);
  const auto known = modules.by_path.find(path);
  if (known != modules.by_path.end()) return known->second;
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file || bytes.empty()) throw std::runtime_error("cannot open the module " + path);
  return modules.by_path[path] = std::make_shared<const ModuleImage>(ModuleImage{std::move(bytes)});
}

void CloseModule(const std::string& path) {
  Modules& modules = AllModules();
  const std::lock_guard<std::mutex> lock(modules.mutex);
  modules.by_path.erase(path);
}

CudaFunction::CudaFunction(const std::shared_ptr<const ModuleImage>& image,
                           const std::string& symbol, int32_t device, uint32_t shared_bytes) {
  Modules& modules = AllModules();
  const std::lock_guard<std::mutex> lock(modules.mutex);
  context_ = ContextOf(modules, device);
  const InContext inside(context_);
  auto& [owner, module] = modules.loaded[{image.get(), device}];
  if (owner.lock() != image) {
    Check(Cuda().module_load_data(&module, image->bytes.c_str()),
          "loading the module of " + symbol);
    owner = image;
  }
  Check(Cuda().module_get_function(&function_, module, symbol.c_str()),
        "finding the kernel " + symbol);
  if (shared_bytes > kSharedBytesForAll) {
    Check(Cuda().function_set_attribute(function_, kMaxDynamicSharedBytes,
                                        static_cast<int>(shared_bytes)),
          "asking for " + std::to_string(shared_bytes) + " bytes of shared memory for " + symbol);
  }
}

void CudaFunction::Launch(const std::array<uint32_t, 3>& grid, uint32_t threads,
                          uint32_t shared_bytes, void* stream, void** parameters) const {
  const InContext inside(context_);
  const Status status = Cuda().launch_kernel(function_, grid[0], grid[1], grid[2], threads, 1, 1,
                                             shared_bytes, stream, parameters, nullptr);
  if (status != 0) Check(status, "launching a kernel");
}

InPrimaryContext::InPrimaryContext(int32_t device) {
  Modules& modules = AllModules();
  const std::lock_guard<std::mutex> lock(modules.mutex);
  inside_ = std::make_shared<InContext>(ContextOf(modules, device));
}

}  // namespace torch_hybrid_backend
