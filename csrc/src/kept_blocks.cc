#include "kept_blocks.h"

#include <algorithm>
#include <new>
#include <utility>

namespace torch_hybrid_backend {

namespace {

struct Current {
  std::mutex mutex;
  std::weak_ptr<KeptBlocks> kept;
};

Current& OfThisProcess() {
  static Current current;
  return current;
}

}  // namespace

std::shared_ptr<KeptBlocks> KeptBlocks::OfProcess() {
  Current& current = OfThisProcess();
  const std::lock_guard<std::mutex> lock(current.mutex);
  std::shared_ptr<KeptBlocks> kept = current.kept.lock();
  if (!kept) current.kept = kept = std::make_shared<KeptBlocks>();
  return kept;
}

bool KeptBlocks::FreeIdle() {
  Current& current = OfThisProcess();
  std::shared_ptr<KeptBlocks> kept;
  {
    const std::lock_guard<std::mutex> lock(current.mutex);
    kept = current.kept.lock();
  }
  return kept && kept->Clear();
}

void KeptBlocks::Expect(size_t size_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  limit_bytes_ = std::max(limit_bytes_, size_bytes);
}

AlignedBlock KeptBlocks::Take(size_t size_bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto fits = [size_bytes](const AlignedBlock& block) {
      return block.size_bytes() >= size_bytes && block.size_bytes() - size_bytes <= size_bytes / 4;
    };
    const auto found = std::find_if(idle_.begin(), idle_.end(), fits);
    if (found != idle_.end()) {
      AlignedBlock block = std::move(*found);
      idle_.erase(found);
      idle_bytes_ -= block.size_bytes();
      return block;
    }
  }
  try {
    return AlignedBlock(size_bytes);
  } catch (const std::bad_alloc&) {
    if (!Clear()) throw;
  }
  return AlignedBlock(size_bytes);
}

bool KeptBlocks::Clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool kept_any = !idle_.empty();
  idle_.clear();
  idle_bytes_ = 0;
  return kept_any;
}

void KeptBlocks::GiveBack(AlignedBlock block) noexcept {
  const size_t size_bytes = block.size_bytes();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (size_bytes > limit_bytes_) return;
  try {
    idle_.push_back(std::move(block));
  } catch (const std::bad_alloc&) {
    return;  // the block is freed instead of kept
  }
  idle_bytes_ += size_bytes;
  while (idle_bytes_ > limit_bytes_) {
    idle_bytes_ -= idle_.front().size_bytes();
    idle_.erase(idle_.begin());
  }
}

}  // namespace torch_hybrid_backend
