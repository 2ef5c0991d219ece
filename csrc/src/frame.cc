#include "frame.h"

#include <algorithm>
#include <new>
#include <utility>

namespace torch_hybrid_backend {

std::unique_ptr<Frame> FramePool::TakeIdle(const Streams& streams) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // The one given back last: it is what the caches still hold.
  const auto found = std::find_if(idle_.rbegin(), idle_.rend(),
                                  [&](const auto& frame) { return frame->streams == streams; });
  if (found == idle_.rend()) return nullptr;
  std::unique_ptr<Frame> frame = std::move(*found);
  idle_.erase(std::next(found).base());
  return frame;
}

void FramePool::GiveBack(std::unique_ptr<Frame> frame) noexcept {
  if (frame->is_captured) return;
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
