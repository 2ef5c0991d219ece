// Frame: all that one running call of a plan writes to, so that two calls never share anything.
//
// Ownership: a frame owns its arena, argument tables and the tensors alive in its call. FramePool
// owns idle frames; a Lease owns a frame during a call and gives it back, emptied of tensors, when
// it ends, also by an exception.
//
// Failure: making a frame throws std::bad_alloc; leasing an idle one and giving it back do not
// throw.
#ifndef TORCH_HYBRID_BACKEND_FRAME_H_
#define TORCH_HYBRID_BACKEND_FRAME_H_

#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "aligned_block.h"
#include "kernel_abi.h"

namespace torch_hybrid_backend {

struct Frame {
  AlignedBlock arena;
  std::vector<DLTensor> views;       // one for each value
  std::vector<TVMFFIAny> arguments;  // of all kernels, one after the other; they point into `views`
  std::vector<std::optional<torch::stable::Tensor>>
      tensors;  // one for each value; filled while alive
};

class FramePool {
 public:
  class Lease {
   public:
    Lease(FramePool& pool, std::unique_ptr<Frame> frame) : pool_(pool), frame_(std::move(frame)) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { pool_.GiveBack(std::move(frame_)); }
    Frame& operator*() const { return *frame_; }

   private:
    FramePool& pool_;
    std::unique_ptr<Frame> frame_;
  };

  // An idle frame, or null where every frame is in use.
  std::unique_ptr<Frame> TakeIdle();

 private:
  void GiveBack(std::unique_ptr<Frame> frame) noexcept;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Frame>> idle_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_FRAME_H_
