#include "cuda_events.h"

#include <dlfcn.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "cuda_driver.h"

namespace torch_hybrid_backend {
namespace {

// As cuda.h declares them: a status of 0 is success, handles are pointers.
using Status = int;

struct Functions {
  Status (*create)(void** event, unsigned flags);
  Status (*record)(void* event, void* stream);
  Status (*synchronize)(void* event);
  Status (*elapsed_time)(float* milliseconds, void* start, void* end);
  Status (*destroy)(void* event);
};

template <typename Function>
void Find(void* library, const char* name, Function& function) {
  function = library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr)
    throw std::runtime_error(std::string("work on a GPU cannot be timed without ") + name +
                             " of NVIDIA's driver");
}

const Functions& Driver() {
  static const Functions functions = [] {
    // The one that launches and PyTorch use is open already. Never closed.
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    Functions found{};
    Find(library, "cuEventCreate", found.create);
    Find(library, "cuEventRecord", found.record);
    Find(library, "cuEventSynchronize", found.synchronize);
    Find(library, "cuEventElapsedTime", found.elapsed_time);
    Find(library, "cuEventDestroy_v2", found.destroy);
    return found;
  }();
  return functions;
}

void Check(Status status, const char* what) {
  if (status != 0)
    throw std::runtime_error(std::string(what) + " failed: CUDA error " + std::to_string(status));
}

}  // namespace

CudaEvents::~CudaEvents() {
  for (void* const event : events_) Driver().destroy(event);
}

void CudaEvents::Mark() {
  const InPrimaryContext inside(device_);  // an event is of the thread's
  void* event = nullptr;
  Check(Driver().create(&event, 0), "making an event");
  events_.push_back(event);
  Check(Driver().record(event, stream_), "recording an event");
}

std::vector<int64_t> CudaEvents::Nanoseconds() const {
  std::vector<int64_t> spent;
  if (events_.empty()) return spent;
  const InPrimaryContext inside(device_);
  Check(Driver().synchronize(events_.back()), "waiting for an event");
  for (size_t i = 1; i < events_.size(); ++i) {
    float milliseconds = 0;
    Check(Driver().elapsed_time(&milliseconds, events_[i - 1], events_[i]), "asking for a time");
    spent.push_back(std::llround(static_cast<double>(milliseconds) * 1e6));
  }
  return spent;
}

}  // namespace torch_hybrid_backend
