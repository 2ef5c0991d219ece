// CudaDriver: the functions of a driver that launch kernels: NVIDIA's library, opened with the
// first plan that launches one, or functions that a step brings along. Nothing of CUDA is needed to
// build this library, or to load it.
//
// It has run on no GPU yet: csrc/tests/test_device_launch.cc tries it against a driver that records
// what it is asked for, and engines/triton/host_driver.py is one that Triton's interpreter runs
// kernels for.
//
// Ownership: a module that was loaded stays in its device's primary context, the one that PyTorch
// uses, until the process ends: a launch that still runs may need it after its plan is gone, and
// only waiting for the device would tell.
//
// Failure: everything here throws std::runtime_error with the driver's own word for what failed:
// "...: loading the module of add failed: CUDA_ERROR_INVALID_IMAGE (200)". The number is read in
// runtime/native/ops.py, to tell what leaves a GPU unusable.
#ifndef TORCH_HYBRID_BACKEND_CUDA_DRIVER_H_
#define TORCH_HYBRID_BACKEND_CUDA_DRIVER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>

namespace torch_hybrid_backend {

struct Driver;

// Gives the address of a driver's function, by the name that NVIDIA's library exports it under.
using FindFunction = void* (*)(const char* name);

// NVIDIA's driver is the library of that path, or of that name where the loader looks. Throws where
// another one is open already.
void UseDriver(const std::string& path);

// NVIDIA's driver, opened now where it is not open.
const Driver& NvidiaDriver();
// The driver of these functions, which are called as long as the process lives.
const Driver& DriverOf(FindFunction find);

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
  CudaFunction(const Driver& driver, const std::shared_ptr<const ModuleImage>& image,
               const std::string& symbol, int32_t device, uint32_t shared_bytes);

  // `parameters`: the address of each. Returns when the launch is queued.
  void Launch(const std::array<uint32_t, 3>& grid, uint32_t threads, uint32_t shared_bytes,
              void* stream, void** parameters) const;

 private:
  const Driver& driver_;
  void* context_ = nullptr;
  void* function_ = nullptr;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_CUDA_DRIVER_H_
