#include "aligned_block.h"

#include <new>

namespace torch_hybrid_backend {

AlignedBlock::AlignedBlock(size_t size_bytes) : size_bytes_(size_bytes) {
  if (size_bytes == 0) return;
  // aligned_alloc wants a whole number of alignments.
  const size_t rounded = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
  memory_.reset(std::aligned_alloc(kAlignment, rounded));
  if (!memory_) throw std::bad_alloc();
}

}  // namespace torch_hybrid_backend
