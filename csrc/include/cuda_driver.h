// CudaDriver: the functions of NVIDIA's driver that launch kernels, found when the first launch is
// prepared. Nothing of CUDA is needed to build this library, or to load it.
//
// It has run on no GPU yet: csrc/tests/test_device_launch.cc tries it against a driver that records
// what it is asked for.
//
// Ownership: a module that was loaded stays in its device's primary context, the one that PyTorch
// uses, until the process ends: a launch that still runs may need it after its plan is gone, and
// only waiting for the device would tell.
//
// Failure: everything here throws std::runtime_error with the driver's own word for what failed.
#ifndef TORCH_HYBRID_BACKEND_CUDA_DRIVER_H_
#define TORCH_HYBRID_BACKEND_CUDA_DRIVER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>

namespace torch_hybrid_backend {

// A compiled module (a cubin, a fat binary or PTX), as bytes. Each is loaded once on each device.
struct ModuleImage {
  std::string bytes;  // with a zero behind it: PTX is a text
};

// The image at `path`: read once, and kept until CloseModule and the last step that uses it.
std::shared_ptr<const ModuleImage> OpenModule(const std::string& path);
// Forgets the image. Does nothing where none of that path is open.
void CloseModule(const std::string& path);

class CudaFunction {
 public:
  // Loads the module on the device, unless it is there, and allows `shared_bytes` of dynamic shared
  // memory.
  CudaFunction(const std::shared_ptr<const ModuleImage>& image, const std::string& symbol,
               int32_t device, uint32_t shared_bytes);

  // `parameters`: the address of each. Returns when the launch is queued.
  void Launch(const std::array<uint32_t, 3>& grid, uint32_t threads, uint32_t shared_bytes,
              void* stream, void** parameters) const;

 private:
  void* context_ = nullptr;
  void* function_ = nullptr;
};

// The calling thread is in a device's primary context as long as it lives.
class InPrimaryContext {
 public:
  explicit InPrimaryContext(int32_t device);

 private:
  std::shared_ptr<void> inside_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_CUDA_DRIVER_H_
