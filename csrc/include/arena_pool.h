// ArenaPool: arenas on the host, which the calls of all plans borrow.
//
// The plans of a process mostly run one after the other: the graphs between two breaks, a forward
// graph and its backward graph. So the process holds as many blocks as calls run at once, each as
// large as the largest arena that was asked of it, not one for each plan.
//
// Use: a plan holds a Need as long as it lives; a call takes a Block, which goes back with it.
//
// Ownership: the pool owns idle blocks, a Block the one that it holds. The pool of the process is
// never destroyed. Idle blocks larger than any plan needs, and those beyond the calls that ran at
// once of late, are freed.
//
// Failure: taking a block and holding a Need throw std::bad_alloc; nothing else throws. Threads may
// call at once, also around a fork.
#ifndef TORCH_HYBRID_BACKEND_ARENA_POOL_H_
#define TORCH_HYBRID_BACKEND_ARENA_POOL_H_

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "aligned_block.h"
#include "calls_at_once.h"

namespace torch_hybrid_backend {

class ArenaPool {
 public:
  static ArenaPool& OfProcess();

  // A plan of an arena of so many bytes exists.
  class Need {
   public:
    explicit Need(size_t size_bytes);
    Need(const Need&) = delete;
    Need& operator=(const Need&) = delete;
    ~Need();

   private:
    size_t size_bytes_;
  };

  // Memory of a call; empty where it needs none.
  class Block {
   public:
    Block() = default;
    explicit Block(size_t size_bytes)
        : block_(size_bytes == 0 ? AlignedBlock() : OfProcess().Take(size_bytes)) {}
    Block(Block&&) = default;
    Block& operator=(Block&& other) noexcept {
      std::swap(block_, other.block_);
      return *this;
    }
    ~Block() {
      if (block_.data() != nullptr) OfProcess().GiveBack(std::move(block_));
    }
    void* data() const { return block_.data(); }

   private:
    AlignedBlock block_;
  };

  // Frees the idle blocks beyond so many.
  void KeepIdle(size_t most) noexcept;

  size_t idle() const;

 private:
  AlignedBlock Take(size_t size_bytes);
  void GiveBack(AlignedBlock block) noexcept;
  void Add(size_t size_bytes);
  void Remove(size_t size_bytes) noexcept;

  mutable std::mutex mutex_;
  std::vector<AlignedBlock> idle_;  // the one given back last at the end
  std::map<size_t, size_t> needs_;  // plans by the bytes of their arenas
  CallsAtOnce calls_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ARENA_POOL_H_
