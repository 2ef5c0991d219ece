// Launch: a step that launches one kernel on a GPU (steps/device_launch.cc), as a graph of several
// takes it (steps/launch_graph.cc).
//
// Ownership and failure: as of any step.
#ifndef TORCH_HYBRID_BACKEND_LAUNCH_H_
#define TORCH_HYBRID_BACKEND_LAUNCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_driver.h"
#include "step.h"

namespace torch_hybrid_backend {

class Launch : public Step {
 public:
  // Without blocks there is nothing to launch.
  virtual bool HasBlocks() const = 0;
  // What it is launched with in the call that the frame is used for.
  virtual KernelNode Node(Frame& frame) const = 0;
  // Adds the parameters that may differ from call to call with one frame, in units of eight bytes:
  // as many in each call.
  virtual void AddVarying(const Frame& frame, std::vector<uint64_t>& words) const = 0;
};

std::unique_ptr<Step> MakeDeviceLaunch(const Json& description, PlanParts& plan);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_LAUNCH_H_
