// Device: where a value lives, and the stream of work that the caller uses there.
//
// Devices are plain data. `type` is PyTorch's number for the kind of device. The runner knows no
// other than the host (runner/device.cc).
//
// Failure: Device::Named and CurrentStream throw std::runtime_error.
#ifndef TORCH_HYBRID_BACKEND_DEVICE_H_
#define TORCH_HYBRID_BACKEND_DEVICE_H_

#include <cstdint>
#include <string>

namespace torch_hybrid_backend {

// Where the arena of a device and the values in it begin: what PyTorch's allocator for CUDA gives
// at least, and wide enough for every vector access of a kernel there. (On the host: kAlignment.)
inline constexpr size_t kDeviceAlignment = 256;

// Where every address that a step is given on a device other than the host begins at least: kernels
// there are compiled to read and write 16 bytes at once. core/limits.py has the number too.
inline constexpr size_t kAddressAlignment = 16;

struct Device {
  int32_t type;
  int32_t index;
  bool is_host;  // it has one memory, whatever the index

  static Device Host();
  // As torch writes it: "cpu", "cuda:1". A bare "cuda" is the first one.
  static Device Named(const std::string& name);

  bool operator==(const Device&) const = default;
  bool IsCuda() const;
  std::string ToString() const;
};

// The stream that the calling thread uses on a CUDA device now: a CUstream, null for the default
// one. Throws for other devices, and where this torch is built without CUDA.
void* CurrentStream(const Device& device);

// True while what is queued on the stream of a GPU is captured into a graph of the caller's, to run
// later. The default stream, which is null, cannot be captured.
bool IsCapturing(void* stream);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_DEVICE_H_
