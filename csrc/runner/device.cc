#include "device.h"

#include <stdexcept>

namespace torch_hybrid_backend {

Device Device::Host() { return {0, 0, true}; }

Device Device::Named(const std::string& name) {
  if (name == "cpu" || name.starts_with("cpu:")) return Host();
  throw std::runtime_error("the runner has no device \"" + name +
                           "\": it runs models that were exported for the CPU");
}

bool Device::IsCuda() const { return false; }

std::string Device::ToString() const { return "the CPU"; }

void* CurrentStream(const Device& device) {
  throw std::runtime_error(device.ToString() + " has no streams that a plan knows");
}

bool IsCapturing(void* /*stream*/) { return false; }

}  // namespace torch_hybrid_backend
