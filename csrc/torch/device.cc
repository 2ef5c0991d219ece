#include "device.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <stdexcept>

namespace torch_hybrid_backend {
namespace {

using GetStream = AOTITorchError (*)(int32_t device_index, void** stream);

// Of libtorch_cuda, which this library is not linked with: it must load beside a torch without it.
GetStream FindGetStream() {
  constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
  void* function = dlsym(RTLD_DEFAULT, kName);
  if (function == nullptr) {
    // torch opens its libraries where RTLD_DEFAULT does not look.
    if (void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY)) {
      function = dlsym(library, kName);
      dlclose(library);  // PyTorch keeps it
    }
  }
  return reinterpret_cast<GetStream>(function);
}

}  // namespace

Device Device::Host() { return {aoti_torch_device_type_cpu(), 0, true}; }

Device Device::Named(const std::string& name) {
  uint32_t type = 0;
  int32_t index = 0;
  if (torch_parse_device_string(name.c_str(), &type, &index) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("no device is called \"" + name + "\"");
  }
  if (static_cast<int32_t>(type) == aoti_torch_device_type_cpu()) return Host();
  return {static_cast<int32_t>(type), std::max(index, 0), false};
}

bool Device::IsCuda() const { return type == aoti_torch_device_type_cuda(); }

std::string Device::ToString() const {
  if (is_host) return "the CPU";
  const std::string kind = IsCuda() ? "cuda" : "device type " + std::to_string(type);
  return kind + ":" + std::to_string(index);
}

void* CurrentStream(const Device& device) {
  if (!device.IsCuda())
    throw std::runtime_error(device.ToString() + " has no streams that a plan knows");
  static const GetStream get = FindGetStream();
  void* stream = nullptr;
  if (get == nullptr || get(device.index, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("the current stream of " + device.ToString() +
                             " cannot be told: this torch is built without CUDA, or cannot use it");
  }
  return stream;
}

}  // namespace torch_hybrid_backend
