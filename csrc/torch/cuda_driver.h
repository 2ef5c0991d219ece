// CudaDriver: the functions of a driver that launch kernels: NVIDIA's library, opened with the
// first plan that launches one, or functions that a step brings along. Nothing of CUDA is needed to
// build this library, or to load it.
//
// It has run on no GPU yet: csrc/tests/test_device_launch.cc tries it against a driver that records
// what it is asked for, and engines/triton/host_driver.py is one that Triton's interpreter runs
// kernels for.
//
// Ownership: a module that was loaded stays in its device's primary context, the one that PyTorch
// uses, until the process ends: a launch that still runs may need it after its plan is gone. Events
// on the streams that the plan was used on would tell when it is done, but a stream may be gone by
// then, and a CUDA graph that the caller captured launches its kernels for as long as the graph
// lives, which nobody tells us. So that plans which are made again and again add nothing, a module
// is known by its contents: there are as many as there are different kernels.
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
#include <utility>
#include <vector>

namespace torch_hybrid_backend {

struct Driver;
struct EventDriver;
struct GraphDriver;

// Gives the address of a driver's function, by the name that NVIDIA's library exports it under.
using FindFunction = void* (*)(const char* name);

// NVIDIA's driver is the library of that path, or of that name where the loader looks. Throws where
// another one is open already.
void UseDriver(const std::string& path);

// NVIDIA's driver, opened now where it is not open.
const Driver& NvidiaDriver();
// The driver of these functions, which are called as long as the process lives.
const Driver& DriverOf(FindFunction find);

// A compiled module (a cubin, a fat binary or PTX), as bytes. Equal ones are loaded once on each
// device.
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
  friend class CudaGraph;
  const Driver& driver_;
  void* context_ = nullptr;
  void* function_ = nullptr;
};

// How long the work of several steps took on a GPU's stream, one after the other. Mark before the
// first step and after each; then Nanoseconds, which waits for the last mark.
class CudaEvents {
 public:
  CudaEvents(int32_t device, void* stream);
  CudaEvents(const CudaEvents&) = delete;
  CudaEvents& operator=(const CudaEvents&) = delete;
  ~CudaEvents();

  void Mark();
  // Between each mark and the next one: one number fewer than there are marks. An event tells its
  // time to about half a microsecond.
  std::vector<int64_t> Nanoseconds() const;

 private:
  const Driver& driver_;
  const EventDriver& functions_;
  void* const context_;
  void* const stream_;
  std::vector<void*> events_;
};

// A launch as a node of a graph: what CudaFunction::Launch takes.
struct KernelNode {
  const CudaFunction* function;
  std::array<uint32_t, 3> grid;  // without a 0
  uint32_t threads;
  uint32_t shared_bytes;
  void** parameters;  // read when they are handed over
};

// Graphs that there may be at once in the process: the driver keeps memory for each, on the device
// too (how much was not measured).
inline constexpr int kMostGraphs = 1024;

// Kernels of one device that are launched together. The driver's functions for it are looked for
// with the first one: a driver without them launches kernels all the same.
//
// A graph is one thread's at a time. It may be destroyed while it runs: the driver then frees it
// when it has run.
class CudaGraph {
 public:
  // `after[i]`: nodes that node i waits for, all of them before it. Throws where there are
  // kMostGraphs.
  CudaGraph(const std::vector<KernelNode>& nodes, const std::vector<std::vector<size_t>>& after);
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  // Launches each kernel as before, or as `changed` says, which has nodes by their numbers. A
  // launch that has not ended keeps what it was launched with. Returns when the launch is queued.
  void Launch(const std::vector<std::pair<size_t, KernelNode>>& changed, void* stream);

 private:
  // One of kMostGraphs.
  class Place {
   public:
    Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    ~Place();
  };

  const Place place_;
  const Driver& driver_;
  const GraphDriver& graphs_;
  void* const context_;
  std::vector<void*> nodes_;                     // their handles in the graph, which keep
  std::unique_ptr<void, int (*)(void*)> graph_;  // their meaning as long as it lives
  std::unique_ptr<void, int (*)(void*)> executable_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_CUDA_DRIVER_H_
