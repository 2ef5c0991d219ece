// KeptBlocks: memory of large tensors that callers have dropped, kept for the next call.
//
// The C library gives blocks of this size back to the system when they are freed, and takes fresh
// pages for the next: 1,024 x 50,257 logits cost 65 ms of page faults in every call
// (docs/performance.md). A tensor over such a block cannot be resized beyond its size.
//
// Ownership: the plans that make large tensors share the one KeptBlocks of the process; it and its
// idle blocks go with the last of them. A block that is out belongs to its tensor's deleter.
//
// Failure: Take throws std::bad_alloc; GiveBack does not throw. Threads may call at once.
#ifndef TORCH_HYBRID_BACKEND_KEPT_BLOCKS_H_
#define TORCH_HYBRID_BACKEND_KEPT_BLOCKS_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "aligned_block.h"

namespace torch_hybrid_backend {

// glibc maps larger blocks whatever was freed before (DEFAULT_MMAP_THRESHOLD_MAX).
inline constexpr size_t kLargeBytes = size_t{32} << 20;

class KeptBlocks {
 public:
  // The one of this process, while anyone holds it; else a new one.
  static std::shared_ptr<KeptBlocks> OfProcess();

  // Frees what is kept and idle in this process: for others who find no memory. False where that
  // was nothing.
  static bool FreeIdle();

  // Tensors of so many bytes will be asked for: as much as the largest of them is kept, no more. So
  // a training step, which drops all its activations one by one, does not leave them all here.
  void Expect(size_t size_bytes);

  // A kept block of at least this size, and at most a quarter more; else a new one. Kept blocks are
  // freed where there is no memory for it otherwise.
  AlignedBlock Take(size_t size_bytes);

  // Keeps the block; the oldest ones are freed where that would be too many.
  void GiveBack(AlignedBlock block) noexcept;

 private:
  bool Clear();

  std::mutex mutex_;
  std::vector<AlignedBlock> idle_;  // oldest first
  size_t idle_bytes_ = 0;
  size_t limit_bytes_ = 0;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_KEPT_BLOCKS_H_
