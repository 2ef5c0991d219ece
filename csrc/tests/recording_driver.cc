#include "recording_driver.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

namespace {

struct Module {
  std::vector<int> parameter_bytes;
  int device;
};

struct Function {
  Module* module;
  std::string symbol;
  int shared_bytes_allowed = 48 << 10;
};

struct Context {
  int device;
};

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

std::mutex mutex;
std::vector<Launch> launched;
// A launch, or the launches of a graph in the order in which they run.
using Batch = std::vector<Launch>;
std::map<void*, std::deque<Batch>> queued;
std::map<void*, float> work_ms;  // by stream: a block takes a millisecond
int modules = 0;
bool fails = false;
thread_local std::vector<Context*> stack;

Context* PrimaryContext(int device) {
  static Context contexts[2] = {{0}, {1}};
  return &contexts[device];
}

void Execute(const Launch& launch) {
  if (launch.symbol != "double") return;
  const auto* x = reinterpret_cast<const float*>(launch.parameters[0]);
  auto* y = reinterpret_cast<float*>(launch.parameters[1]);
  const auto count = static_cast<int32_t>(launch.parameters[2]);
  for (int32_t i = 0; i < count; ++i) y[i] = 2 * x[i];
}

Launch LaunchOf(const Function& function, std::vector<unsigned> grid, std::vector<unsigned> block,
                unsigned shared_bytes, void** parameters) {
  Launch launch{function.symbol,
                std::move(grid),
                std::move(block),
                shared_bytes,
                function.shared_bytes_allowed,
                nullptr,
                function.module->device,
                {}};
  for (size_t i = 0; i < function.module->parameter_bytes.size(); ++i) {
    uint64_t parameter = 0;
    std::memcpy(&parameter, parameters[i], function.module->parameter_bytes[i]);
    launch.parameters.push_back(parameter);
  }
  return launch;
}

// As cuda.h declares it.
struct NodeParameters {
  void* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};

struct Graph;
struct Node {
  Graph* graph;
  size_t number;
};
struct Graph {
  std::vector<std::unique_ptr<Node>> handles;
  std::vector<Launch> nodes;
  std::vector<std::vector<size_t>> after;
};
struct Executable {
  const Graph* graph;
  std::vector<Launch> nodes;
  std::vector<std::vector<size_t>> after;
};

std::vector<std::string> calls;
std::string failing;
std::vector<std::vector<size_t>> last_edges;
int alive = 0;
std::set<void*> capturing;
thread_local int capture_mode = 0;

// Whether the call of the function fails. With the lock held.
bool Called(const char* function) {
  calls.emplace_back(function);
  return failing == function;
}

Launch LaunchOf(const NodeParameters& node) {
  return LaunchOf(*static_cast<const Function*>(node.function), {node.grid, node.grid + 3},
                  {node.block, node.block + 3}, node.shared_bytes, node.parameters);
}

bool IsLegal(const NodeParameters& node) {
  return node.extra == nullptr && node.kernel == nullptr && node.context == nullptr &&
         std::find(node.grid, node.grid + 3, 0U) == node.grid + 3;
}

// The last that may run first, and so on.
Batch InAnotherOrder(const Executable& executable) {
  Batch batch;
  std::vector<bool> done(executable.nodes.size(), false);
  while (batch.size() < done.size()) {
    for (size_t node = done.size(); node-- > 0;) {
      const auto& after = executable.after[node];
      if (done[node] || !std::all_of(after.begin(), after.end(), [&](size_t n) { return done[n]; }))
        continue;
      batch.push_back(executable.nodes[node]);
      done[node] = true;
      break;
    }
  }
  return batch;
}

void Queue(void* stream, Batch batch) {
  for (Launch& launch : batch) {
    launch.stream = stream;
    launched.push_back(launch);
    work_ms[stream] += static_cast<float>(launch.grid[0]);
  }
  if (!capturing.contains(stream)) queued[stream].push_back(std::move(batch));
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? 0 : 101;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = PrimaryContext(device);
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = stack.empty() ? nullptr : stack.back();
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  stack.push_back(static_cast<Context*>(context));
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = stack.back();
  stack.pop_back();
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  std::istringstream words(static_cast<const char*>(image));
  auto loaded = std::make_unique<Module>(Module{{}, stack.back()->device});
  for (int bytes = 0; words >> bytes;) loaded->parameter_bytes.push_back(bytes);
  if (!words.eof()) return 200;
  ++modules;
  static std::vector<std::unique_ptr<Module>> all;  // under the runtime's own lock
  *module = all.emplace_back(std::move(loaded)).get();
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (std::strcmp(name, "double") != 0 && std::strcmp(name, "nothing") != 0) return 500;
  static std::vector<std::unique_ptr<Function>> functions;  // under the runtime's own lock
  functions.push_back(std::make_unique<Function>(Function{static_cast<Module*>(module), name}));
  *function = functions.back().get();
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != 8) return 1;
  static_cast<Function*>(function)->shared_bytes_allowed = value;
  return 0;
}

int cuLaunchKernelEx(const LaunchConfig* config, void* handle, void** parameters, void** extra) {
  const auto* function = static_cast<const Function*>(handle);
  if (fails || extra != nullptr || config->attribute_count != 0 || stack.empty() ||
      stack.back()->device != function->module->device)
    return 700;
  const std::lock_guard<std::mutex> lock(mutex);
  calls.emplace_back(__func__);
  Queue(config->stream, {LaunchOf(*function, {config->grid_x, config->grid_y, config->grid_z},
                                  {config->block_x, config->block_y, config->block_z},
                                  config->shared_bytes, parameters)});
  return 0;
}

int cuStreamIsCapturing(void* stream, int* status) {
  const std::lock_guard<std::mutex> lock(mutex);
  calls.emplace_back(__func__);
  *status = capturing.contains(stream) ? 1 : 0;
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}

int cuGraphCreate(void** graph, unsigned flags) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (Called(__func__) || flags != 0) return 1;
  *graph = new Graph;
  ++alive;
  return 0;
}

int cuGraphAddKernelNode_v2(void** node, void* handle, void* const* after, size_t count,
                            const NodeParameters* parameters) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (Called(__func__) || !IsLegal(*parameters)) return 1;
  auto* graph = static_cast<Graph*>(handle);
  std::vector<size_t> numbers;
  for (size_t i = 0; i < count; ++i) {
    const auto* before = static_cast<const Node*>(after[i]);
    if (before->graph != graph) return 1;
    numbers.push_back(before->number);
  }
  *node = graph->handles.emplace_back(new Node{graph, graph->nodes.size()}).get();
  graph->nodes.push_back(LaunchOf(*parameters));
  graph->after.push_back(std::move(numbers));
  return 0;
}

int cuGraphInstantiateWithFlags(void** executable, void* handle, unsigned long long flags) {
  const std::lock_guard<std::mutex> lock(mutex);
  // It takes memory: not while somebody may be capturing, unless the thread says that it knows.
  if (Called(__func__) || flags != 0 || capture_mode != 2) return 1;
  const auto* graph = static_cast<const Graph*>(handle);
  *executable = new Executable{graph, graph->nodes, graph->after};
  last_edges = graph->after;
  ++alive;
  return 0;
}

int cuGraphExecKernelNodeSetParams_v2(void* handle, void* node_handle,
                                      const NodeParameters* parameters) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* executable = static_cast<Executable*>(handle);
  const auto* node = static_cast<const Node*>(node_handle);
  if (Called(__func__) || !IsLegal(*parameters) || node->graph != executable->graph) return 1;
  executable->nodes[node->number] = LaunchOf(*parameters);
  return 0;
}

int cuGraphLaunch(void* handle, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (Called(__func__)) return 1;
  if (fails || stack.empty()) return 700;
  Queue(stream, InAnotherOrder(*static_cast<const Executable*>(handle)));
  return 0;
}

int cuGraphExecDestroy(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  delete static_cast<Executable*>(handle);
  --alive;
  return 0;
}

int cuGraphDestroy(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  delete static_cast<Graph*>(handle);
  --alive;
  return 0;
}

int cuEventCreate(void** event, unsigned) {
  *event = new float(-1);
  return 0;
}

int cuEventRecord(void* event, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  *static_cast<float*>(event) = work_ms[stream];
  return 0;
}

int cuEventSynchronize(void* event) { return *static_cast<float*>(event) < 0 ? 400 : 0; }

int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  *milliseconds = *static_cast<float*>(end) - *static_cast<float*>(start);
  return 0;
}

int cuEventDestroy_v2(void* event) {
  delete static_cast<float*>(event);
  return 0;
}

int cuGetErrorName(int status, const char** name) {
  *name = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_SOMETHING";
  return 0;
}

extern const Recording recording;
const Recording recording = {
    [] {
      const std::lock_guard<std::mutex> lock(mutex);
      return std::exchange(launched, {});
    },
    [](void* stream, size_t most) {
      const std::lock_guard<std::mutex> lock(mutex);
      for (std::deque<Batch>& queue = queued[stream]; most > 0 && !queue.empty(); --most) {
        for (const Launch& launch : queue.front()) Execute(launch);
        queue.pop_front();
      }
    },
    [] { return modules; },
    [] { return static_cast<int>(stack.size()); },
    [](bool now) { fails = now; },
};

extern const RecordingGraphs recording_graphs;
const RecordingGraphs recording_graphs = {
    [] {
      const std::lock_guard<std::mutex> lock(mutex);
      return std::exchange(calls, {});
    },
    [] { return last_edges; },
    [](const std::string& function) { failing = function; },
    [](void* stream, bool begins) {
      if (begins) {
        capturing.insert(stream);
      } else {
        capturing.erase(stream);
      }
    },
    [] { return alive; },
};
}
