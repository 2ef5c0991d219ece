#include "cuda_driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "device.h"

namespace torch_hybrid_backend {
namespace {

// As cuda.h declares them: a status of 0 is success, handles are pointers.
using Status = int;
constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
// What a kernel may have without asking.
constexpr uint32_t kSharedBytesForAll = 48 << 10;

// As cuda.h declares it. Attributes are what a launch has beside its grid: blocks in clusters, for
// one. No kernel of ours asks for any.
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

// Where the functions of a driver are found by name.
struct Library {
  std::string name;
  std::function<void*(const char*)> find;
};

template <typename Function>
void Find(const Library& library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(library.find(name));
  if (function == nullptr)
    throw std::runtime_error(library.name + " has no " + name + ": the driver is too old");
}

}  // namespace

struct Driver {
  Library library;
  Status (*init)(unsigned flags);
  Status (*device_get)(int* device, int ordinal);
  Status (*primary_context_retain)(void** context, int device);
  Status (*context_get_current)(void** context);
  Status (*context_push)(void* context);
  Status (*context_pop)(void** context);
  Status (*module_load_data)(void** module, const void* image);
  Status (*module_get_function)(void** function, void* module, const char* name);
  Status (*function_set_attribute)(void* function, int attribute, int value);
  Status (*launch_kernel)(const LaunchConfig* config, void* function, void** parameters,
                          void** extra);
  Status (*stream_is_capturing)(void* stream, int* status);
  Status (*error_name)(Status status, const char** name);
};

namespace {

Driver DriverIn(const Library& library) {
  Driver driver{};
  driver.library = library;
  Find(library, "cuInit", driver.init);
  Find(library, "cuDeviceGet", driver.device_get);
  Find(library, "cuDevicePrimaryCtxRetain", driver.primary_context_retain);
  Find(library, "cuCtxGetCurrent", driver.context_get_current);
  Find(library, "cuCtxPushCurrent_v2", driver.context_push);
  Find(library, "cuCtxPopCurrent_v2", driver.context_pop);
  Find(library, "cuModuleLoadData", driver.module_load_data);
  Find(library, "cuModuleGetFunction", driver.module_get_function);
  Find(library, "cuFuncSetAttribute", driver.function_set_attribute);
  Find(library, "cuLaunchKernelEx", driver.launch_kernel);
  Find(library, "cuStreamIsCapturing", driver.stream_is_capturing);
  Find(library, "cuGetErrorName", driver.error_name);
  return driver;
}

struct Drivers {
  std::mutex mutex;
  std::string path = "libcuda.so.1";
  std::unique_ptr<const Driver> nvidia;  // once it is open
  std::map<FindFunction, std::unique_ptr<const Driver>> others;
};

Drivers& AllDrivers() {
  static auto* const drivers = new Drivers;  // never destroyed, as AllModules()
  return *drivers;
}

void Check(const Driver& driver, Status status, const std::string& what) {
  if (status == 0) return;
  const char* name = nullptr;
  driver.error_name(status, &name);
  throw std::runtime_error(what + " failed: " + (name != nullptr ? name : "CUDA_ERROR_UNKNOWN") +
                           " (" + std::to_string(status) + ")");
}

// Makes a context the calling thread's, where it is not.
class InContext {
 public:
  InContext(const Driver& driver, void* context) : driver_(driver) {
    void* current = nullptr;
    Check(driver, driver.context_get_current(&current), "asking for the thread's CUDA context");
    if (current == context) return;
    Check(driver, driver.context_push(context), "entering a CUDA context");
    pushed_ = true;
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  ~InContext() {
    void* popped = nullptr;
    if (pushed_) driver_.context_pop(&popped);
  }

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

using DeviceOfDriver = std::pair<const Driver*, int32_t>;

struct Modules {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const ModuleImage>> by_path;
  std::map<DeviceOfDriver, void*> contexts;
  // By their contents, of each driver and device.
  std::map<std::pair<DeviceOfDriver, std::string>, void*> loaded;
};

Modules& AllModules() {
  // Never destroyed: launches may still be queued while the process exits.
  static auto* const modules = new Modules;
  return *modules;
}

void* ContextOf(Modules& modules, const DeviceOfDriver& of) {
  const auto& [driver, device] = of;
  void*& context = modules.contexts[of];
  if (context == nullptr) {
    const std::string gpu = "GPU " + std::to_string(device);
    Check(*driver, driver->init(0), "starting the CUDA driver");
    int handle = 0;
    Check(*driver, driver->device_get(&handle, device), "finding " + gpu);
    Check(*driver, driver->primary_context_retain(&context, handle), "the context of " + gpu);
  }
  return context;
}

}  // namespace

void UseDriver(const std::string& path) {
  Drivers& drivers = AllDrivers();
  const std::lock_guard<std::mutex> lock(drivers.mutex);
  if (drivers.nvidia && path != drivers.path) {
    throw std::runtime_error("this process launches kernels by the driver " + drivers.path +
                             " already: it cannot use " + path + " too");
  }
  drivers.path = path;
}

const Driver& NvidiaDriver() {
  Drivers& drivers = AllDrivers();
  const std::lock_guard<std::mutex> lock(drivers.mutex);
  if (!drivers.nvidia) {
    // Never closed: PyTorch uses the same one.
    void* const library = dlopen(drivers.path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw std::runtime_error("kernels cannot be launched on a GPU without NVIDIA's driver: " +
                               std::string(dlerror()));
    }
    const auto find = [library](const char* name) { return dlsym(library, name); };
    drivers.nvidia = std::make_unique<const Driver>(DriverIn({drivers.path, find}));
  }
  return *drivers.nvidia;
}

const Driver& DriverOf(FindFunction find) {
  Drivers& drivers = AllDrivers();
  const std::lock_guard<std::mutex> lock(drivers.mutex);
  std::unique_ptr<const Driver>& driver = drivers.others[find];
  if (!driver) driver = std::make_unique<const Driver>(DriverIn({"the step's driver", find}));
  return *driver;
}

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

CudaFunction::CudaFunction(const Driver& driver, const std::shared_ptr<const ModuleImage>& image,
                           const std::string& symbol, int32_t device, uint32_t shared_bytes)
    : driver_(driver) {
  Modules& modules = AllModules();
  const std::lock_guard<std::mutex> lock(modules.mutex);
  const DeviceOfDriver here(&driver, device);
  context_ = ContextOf(modules, here);
  const InContext inside(driver, context_);
  void*& module = modules.loaded[{here, image->bytes}];
  if (module == nullptr) {
    Check(driver, driver.module_load_data(&module, image->bytes.c_str()),
          "loading the module of " + symbol);
  }
  Check(driver, driver.module_get_function(&function_, module, symbol.c_str()),
        "finding the kernel " + symbol);
  if (shared_bytes > kSharedBytesForAll) {
    Check(driver,
          driver.function_set_attribute(function_, kMaxDynamicSharedBytes,
                                        static_cast<int>(shared_bytes)),
          "asking for " + std::to_string(shared_bytes) + " bytes of shared memory for " + symbol);
  }
}

void CudaFunction::Launch(const std::array<uint32_t, 3>& grid, uint32_t threads,
                          uint32_t shared_bytes, void* stream, void** parameters) const {
  const InContext inside(driver_, context_);
  const LaunchConfig config{grid[0], grid[1],      grid[2], threads, 1,
                            1,       shared_bytes, stream,  nullptr, 0};
  const Status status = driver_.launch_kernel(&config, function_, parameters, nullptr);
  if (status != 0) Check(driver_, status, "launching it");
}

struct EventDriver {
  Status (*create)(void** event, unsigned flags);
  Status (*record)(void* event, void* stream);
  Status (*synchronize)(void* event);
  Status (*elapsed_time)(float* milliseconds, void* start, void* end);
  Status (*destroy)(void* event);
};

namespace {

const EventDriver& NvidiaEvents() {
  static const EventDriver events = [] {
    const Library& library = NvidiaDriver().library;
    EventDriver found{};
    Find(library, "cuEventCreate", found.create);
    Find(library, "cuEventRecord", found.record);
    Find(library, "cuEventSynchronize", found.synchronize);
    Find(library, "cuEventElapsedTime", found.elapsed_time);
    Find(library, "cuEventDestroy_v2", found.destroy);
    return found;
  }();
  return events;
}

void* NvidiaContext(int32_t device) {
  const DeviceOfDriver here(&NvidiaDriver(), device);
  Modules& modules = AllModules();
  const std::lock_guard<std::mutex> lock(modules.mutex);
  return ContextOf(modules, here);
}

}  // namespace

CudaEvents::CudaEvents(int32_t device, void* stream)
    : driver_(NvidiaDriver()),
      functions_(NvidiaEvents()),
      context_(NvidiaContext(device)),
      stream_(stream) {}

CudaEvents::~CudaEvents() {
  for (void* const event : events_) functions_.destroy(event);
}

void CudaEvents::Mark() {
  const InContext inside(driver_, context_);
  void* event = nullptr;
  Check(driver_, functions_.create(&event, 0), "making an event");
  events_.push_back(event);
  Check(driver_, functions_.record(event, stream_), "recording an event");
}

std::vector<int64_t> CudaEvents::Nanoseconds() const {
  std::vector<int64_t> spent;
  if (events_.empty()) return spent;
  Check(driver_, functions_.synchronize(events_.back()), "waiting for an event");
  for (size_t i = 1; i < events_.size(); ++i) {
    float milliseconds = 0;
    Check(driver_, functions_.elapsed_time(&milliseconds, events_[i - 1], events_[i]),
          "asking for a time");
    spent.push_back(std::llround(static_cast<double>(milliseconds) * 1e6));
  }
  return spent;
}

namespace {

// As cuda.h declares it for cuGraphAddKernelNode_v2: of CUDA 12.0 and later.
struct NodeParameters {
  void* function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};
constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

}  // namespace

struct GraphDriver {
  Status (*create)(void** graph, unsigned flags);
  Status (*add_kernel)(void** node, void* graph, void* const* after, size_t count,
                       const NodeParameters* parameters);
  Status (*instantiate)(void** executable, void* graph, unsigned long long flags);
  Status (*set_parameters)(void* executable, void* node, const NodeParameters* parameters);
  Status (*launch)(void* executable, void* stream);
  Status (*destroy)(void* graph);
  Status (*destroy_executable)(void* executable);
  Status (*exchange_capture_mode)(int* mode);
};

namespace {

const GraphDriver& GraphsOf(const Driver& driver) {
  static std::mutex mutex;
  static auto* const known = new std::map<const Driver*, GraphDriver>;  // drivers stay
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known->find(&driver);
  if (found != known->end()) return found->second;
  GraphDriver graphs{};
  Find(driver.library, "cuGraphCreate", graphs.create);
  Find(driver.library, "cuGraphAddKernelNode_v2", graphs.add_kernel);
  Find(driver.library, "cuGraphInstantiateWithFlags", graphs.instantiate);
  Find(driver.library, "cuGraphExecKernelNodeSetParams_v2", graphs.set_parameters);
  Find(driver.library, "cuGraphLaunch", graphs.launch);
  Find(driver.library, "cuGraphDestroy", graphs.destroy);
  Find(driver.library, "cuGraphExecDestroy", graphs.destroy_executable);
  Find(driver.library, "cuThreadExchangeStreamCaptureMode", graphs.exchange_capture_mode);
  return known->emplace(&driver, graphs).first->second;
}

// While another thread captures, a thread may not do what takes memory past the capture, as making
// a graph may, unless it says that it knows.
class BesideCaptures {
 public:
  BesideCaptures(const Driver& driver, const GraphDriver& graphs) : graphs_(graphs) {
    Check(driver, graphs.exchange_capture_mode(&mode_), "working beside captures");
  }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;
  ~BesideCaptures() { graphs_.exchange_capture_mode(&mode_); }

 private:
  const GraphDriver& graphs_;
  int mode_ = kRelaxed;  // then the one that the thread had
};

NodeParameters ParametersOf(const KernelNode& node, void* function) {
  return {.function = function,
          .grid_x = node.grid[0],
          .grid_y = node.grid[1],
          .grid_z = node.grid[2],
          .block_x = node.threads,
          .block_y = 1,
          .block_z = 1,
          .shared_bytes = node.shared_bytes,
          .parameters = node.parameters,
          .extra = nullptr,
          .kernel = nullptr,
          .context = nullptr};
}

std::atomic<int> graphs_alive = 0;

}  // namespace

bool IsCapturing(void* stream) {
  if (stream == nullptr) return false;
  // Without NVIDIA's driver the streams are another maker's, which torch calls CUDA's too.
  static const Driver* const driver = []() -> const Driver* {
    try {
      return &NvidiaDriver();
    } catch (const std::runtime_error&) {
      return nullptr;
    }
  }();
  if (driver == nullptr) return false;
  int capturing = 0;
  // A stream that cannot tell is taken for a captured one: its launches say what is wrong.
  return driver->stream_is_capturing(stream, &capturing) != 0 || capturing != 0;
}

CudaGraph::Place::Place() {
  if (++graphs_alive <= kMostGraphs) return;
  --graphs_alive;
  throw std::runtime_error("there are " + std::to_string(kMostGraphs) +
                           " CUDA graphs in use, and no more are made");
}

CudaGraph::Place::~Place() { --graphs_alive; }

CudaGraph::CudaGraph(const std::vector<KernelNode>& nodes,
                     const std::vector<std::vector<size_t>>& after)
    : driver_(nodes.at(0).function->driver_),
      graphs_(GraphsOf(driver_)),
      context_(nodes.at(0).function->context_),
      graph_(nullptr, graphs_.destroy),
      executable_(nullptr, graphs_.destroy_executable) {
  const InContext inside(driver_, context_);
  const BesideCaptures beside(driver_, graphs_);
  void* made = nullptr;
  Check(driver_, graphs_.create(&made, 0), "making a CUDA graph");
  graph_.reset(made);
  for (size_t i = 0; i < nodes.size(); ++i) {
    std::vector<void*> before;
    for (const size_t node : after.at(i)) before.push_back(nodes_.at(node));
    const NodeParameters parameters = ParametersOf(nodes[i], nodes[i].function->function_);
    Check(driver_,
          graphs_.add_kernel(&made, graph_.get(), before.data(), before.size(), &parameters),
          "adding a kernel to a CUDA graph");
    nodes_.push_back(made);
  }
  Check(driver_, graphs_.instantiate(&made, graph_.get(), 0), "instantiating a CUDA graph");
  executable_.reset(made);
}

void CudaGraph::Launch(const std::vector<std::pair<size_t, KernelNode>>& changed, void* stream) {
  const InContext inside(driver_, context_);
  for (const auto& [node, launch] : changed) {
    const NodeParameters parameters = ParametersOf(launch, launch.function->function_);
    Check(driver_, graphs_.set_parameters(executable_.get(), nodes_[node], &parameters),
          "changing a kernel of a CUDA graph");
  }
  Check(driver_, graphs_.launch(executable_.get(), stream), "launching a CUDA graph");
}

}  // namespace torch_hybrid_backend
