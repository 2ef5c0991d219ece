// AlignedBlock: one block of memory on a cache-line boundary.
//
// Ownership: the block owns its memory and frees it when destroyed; it moves, it does not copy.
//
// Failure: the constructor throws std::bad_alloc; nothing else throws.
#ifndef TORCH_HYBRID_BACKEND_ALIGNED_BLOCK_H_
#define TORCH_HYBRID_BACKEND_ALIGNED_BLOCK_H_

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace torch_hybrid_backend {

// Kernels are compiled for rows of vector registers; 64 bytes is a cache line and the widest of
// them.
inline constexpr size_t kAlignment = 64;

class AlignedBlock {
 public:
  AlignedBlock() = default;
  explicit AlignedBlock(size_t size_bytes);

  void* data() const { return memory_.get(); }
  size_t size_bytes() const { return size_bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_bytes_ = 0;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ALIGNED_BLOCK_H_
