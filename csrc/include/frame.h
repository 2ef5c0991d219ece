// Frame: all that one running call of a plan writes to, so that two calls never share anything.
//
// On the host a call ends when its work has ended. On another device the work may still run when
// the call ends, so a frame that has memory there is used again on the same stream only: the next
// call's work waits for this one's by the order of the stream. (A stream that its owner destroys
// while work is on it must not be: torch's own streams never are.)
//
// While the caller captures the stream into a CUDA graph, a call has a frame of its own, which no
// other call gets: the capture may be replayed, and write to its memory, at any time.
//
// Ownership: a frame owns its arenas on devices, argument tables and the tensors alive in its call,
// and borrows its arena on the host from all plans' (arena_pool.h). FramePool owns idle frames; a
// Lease owns a frame during a call and gives it back, emptied of tensors and that arena, when it
// ends, also by an exception.
//
// A pool keeps as many frames as calls have run at once of late (calls_at_once.h). So threads that
// go on calling at once find their frames, and those of a burst are freed by the calls after it.
// Where threads that have called end, no pool keeps more frames than there are such threads left,
// or one.
//
// Failure: making a frame throws std::bad_alloc; leasing an idle one and giving it back do not
// throw.
#ifndef TORCH_HYBRID_BACKEND_FRAME_H_
#define TORCH_HYBRID_BACKEND_FRAME_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "arena_pool.h"
#include "calls_at_once.h"
#include "device.h"
#include "kernel_abi.h"
#include "tensor.h"

namespace torch_hybrid_backend {

// The caller's current stream on each device other than the host that a plan has memory or launches
// on, in the plan's order. Empty, and so free, for plans of the host alone.
using Streams = std::vector<std::pair<Device, void*>>;

// What a step keeps in a frame from one call to the next.
struct StepState {
  virtual ~StepState() = default;
};

struct Frame {
  Streams streams;
  bool is_captured = false;           // made while the caller captures
  ArenaPool::Block arena;             // the host's, in a call
  void* arena_begin = nullptr;        // where it was when `views` was told
  std::vector<Tensor> device_arenas;  // from PyTorch's allocator, for those streams
  std::vector<DLTensor> views;        // one for each value
  std::vector<TVMFFIAny> arguments;  // of all kernels, one after the other; they point into `views`
  std::vector<void*> parameters;     // of all launches and external calls, likewise
  std::vector<std::unique_ptr<StepState>> states;  // of those steps that keep one
  std::vector<std::optional<Tensor>> tensors;      // one for each value; filled while alive
  // Of the constants that operators take: where each lay in the last call, and a tensor over that
  // memory, which it does not own.
  std::vector<std::pair<void*, std::optional<Tensor>>> constants;
};

class FramePool {
 public:
  FramePool();
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;
  ~FramePool();

  class Lease {
   public:
    Lease(FramePool& pool, std::unique_ptr<Frame> frame) : pool_(pool), frame_(std::move(frame)) {
      pool_.Begin();
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { pool_.GiveBack(std::move(frame_)); }
    Frame& operator*() const { return *frame_; }

   private:
    FramePool& pool_;
    std::unique_ptr<Frame> frame_;
  };

  // An idle frame of these streams, or null where there is none.
  std::unique_ptr<Frame> TakeIdle(const Streams& streams);

  // Frees the idle frames beyond so many, the oldest first.
  void KeepIdle(size_t most) noexcept;

  size_t idle() const;

 private:
  void Begin();
  void GiveBack(std::unique_ptr<Frame> frame) noexcept;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Frame>> idle_;  // the one given back last at the end
  CallsAtOnce calls_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_FRAME_H_
