#include "recording_driver.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
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

std::mutex mutex;
std::vector<Launch> launched;
std::map<void*, std::deque<Launch>> queued;
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

int cuLaunchKernel(void* handle, unsigned x, unsigned y, unsigned z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                   void** parameters, void** extra) {
  const auto* function = static_cast<const Function*>(handle);
  if (fails || extra != nullptr || stack.empty() ||
      stack.back()->device != function->module->device)
    return 700;
  Launch launch{function->symbol,
                {x, y, z},
                {block_x, block_y, block_z},
                shared_bytes,
                function->shared_bytes_allowed,
                stream,
                stack.back()->device,
                {}};
  for (size_t i = 0; i < function->module->parameter_bytes.size(); ++i) {
    uint64_t parameter = 0;
    std::memcpy(&parameter, parameters[i], function->module->parameter_bytes[i]);
    launch.parameters.push_back(parameter);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  launched.push_back(launch);
  work_ms[stream] += static_cast<float>(x);
  queued[stream].push_back(std::move(launch));
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
      for (std::deque<Launch>& queue = queued[stream]; most > 0 && !queue.empty(); --most) {
        Execute(queue.front());
        queue.pop_front();
      }
    },
    [] { return modules; },
    [] { return static_cast<int>(stack.size()); },
    [](bool now) { fails = now; },
};
}
