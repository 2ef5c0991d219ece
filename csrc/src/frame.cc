#include "frame.h"

#include <new>
#include <utility>

namespace torch_hybrid_backend {

std::unique_ptr<Frame> FramePool::TakeIdle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (idle_.empty()) return nullptr;
  std::unique_ptr<Frame> frame = std::move(idle_.back());
  idle_.pop_back();
  return frame;
}

void FramePool::GiveBack(std::unique_ptr<Frame> frame) noexcept {
  for (auto& tensor : frame->tensors) tensor.reset();
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(frame));
  } catch (const std::bad_alloc&) {
    // The frame is freed instead of kept: the next call makes its own.
    frame.reset();
  }
}

}  // namespace torch_hybrid_backend
