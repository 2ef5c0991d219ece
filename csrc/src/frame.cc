#include "frame.h"

#include <algorithm>
#include <new>
#include <utility>

namespace torch_hybrid_backend {
namespace {

// All pools, and how many threads have called plans and still run. Never destroyed: threads end
// after it would be.
struct Process {
  std::mutex mutex;
  std::vector<FramePool*> pools;
  size_t threads = 0;
};

Process& ThisProcess() {
  static Process* const process = new Process;
  return *process;
}

// One in each thread that has called a plan.
struct CallingThread {
  CallingThread() {
    Process& process = ThisProcess();
    const std::lock_guard<std::mutex> lock(process.mutex);
    ++process.threads;
  }
  ~CallingThread() {
    Process& process = ThisProcess();
    const std::lock_guard<std::mutex> lock(process.mutex);
    --process.threads;
    for (FramePool* const pool : process.pools)
      pool->KeepIdle(std::max(process.threads, size_t{1}));
    ArenaPool::OfProcess().KeepIdle(std::max(process.threads, size_t{1}));
  }
};

}  // namespace

FramePool::FramePool() {
  Process& process = ThisProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  process.pools.push_back(this);
}

FramePool::~FramePool() {
  Process& process = ThisProcess();
  const std::lock_guard<std::mutex> lock(process.mutex);
  process.pools.erase(std::find(process.pools.begin(), process.pools.end(), this));
}

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

void FramePool::KeepIdle(size_t most) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (idle_.size() > most) idle_.erase(idle_.begin());
}

size_t FramePool::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return idle_.size();
}

void FramePool::Begin() {
  thread_local const CallingThread thread;
  (void)thread;
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.Begin();
}

void FramePool::GiveBack(std::unique_ptr<Frame> frame) noexcept {
  for (auto& tensor : frame->tensors) tensor.reset();
  frame->arena = ArenaPool::Block();
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.End();
  if (frame->is_captured) return;
  const Streams streams = frame->streams;
  try {
    idle_.push_back(std::move(frame));
  } catch (const std::bad_alloc&) {
    return;  // the frame is freed instead of kept: the next call makes its own
  }
  const auto is_alike = [&](const auto& other) { return other->streams == streams; };
  size_t alike = std::count_if(idle_.begin(), idle_.end(), is_alike);
  for (; alike + calls_.running() > calls_.most(); --alike)
    idle_.erase(std::find_if(idle_.begin(), idle_.end(), is_alike));
}

}  // namespace torch_hybrid_backend
