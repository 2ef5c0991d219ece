#include "arena_pool.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

namespace torch_hybrid_backend {

ArenaPool& ArenaPool::OfProcess() {
  static ArenaPool* const pool = [] {
    static ArenaPool* const made = new ArenaPool;
    // A child of a fork is the one thread that forked: nobody else would unlock its copy.
    pthread_atfork([] { made->mutex_.lock(); }, [] { made->mutex_.unlock(); },
                   [] { made->mutex_.unlock(); });
    return made;
  }();
  return *pool;
}

ArenaPool::Need::Need(size_t size_bytes) : size_bytes_(size_bytes) {
  if (size_bytes > 0) OfProcess().Add(size_bytes);
}

ArenaPool::Need::~Need() {
  if (size_bytes_ > 0) OfProcess().Remove(size_bytes_);
}

void ArenaPool::Add(size_t size_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++needs_[size_bytes];
}

void ArenaPool::Remove(size_t size_bytes) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = needs_.find(size_bytes);
  if (--found->second == 0) needs_.erase(found);
  const size_t most = needs_.empty() ? 0 : needs_.rbegin()->first;
  idle_.erase(std::remove_if(idle_.begin(), idle_.end(),
                             [most](const auto& block) { return block.size_bytes() > most; }),
              idle_.end());
}

AlignedBlock ArenaPool::Take(size_t size_bytes) {
  AlignedBlock small;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.Begin();
    // The one given back last: it is what the caches still hold.
    const auto found = std::find_if(idle_.rbegin(), idle_.rend(), [size_bytes](const auto& block) {
      return block.size_bytes() >= size_bytes;
    });
    if (found != idle_.rend()) {
      AlignedBlock block = std::move(*found);
      idle_.erase(std::next(found).base());
      return block;
    }
    if (!idle_.empty()) {
      small = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  small = AlignedBlock();  // freed first: the new one takes its place
  try {
    return AlignedBlock(size_bytes);
  } catch (const std::bad_alloc&) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.End();
    throw;
  }
}

void ArenaPool::GiveBack(AlignedBlock block) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.End();
  if (needs_.empty() || block.size_bytes() > needs_.rbegin()->first) return;
  try {
    idle_.push_back(std::move(block));
  } catch (const std::bad_alloc&) {
    return;  // the block is freed instead of kept
  }
  while (idle_.size() + calls_.running() > calls_.most()) idle_.erase(idle_.begin());
}

void ArenaPool::KeepIdle(size_t most) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (idle_.size() > most) idle_.erase(idle_.begin());
}

size_t ArenaPool::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return idle_.size();
}

}  // namespace torch_hybrid_backend
