#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "aligned_block.h"
#include "check.h"

using torch_hybrid_backend::AlignedBlock;
using torch_hybrid_backend::kAlignment;

int main() {
  for (const size_t size : {size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{100000}}) {
    const AlignedBlock block(size);
    Check(reinterpret_cast<uintptr_t>(block.data()) % kAlignment == 0, "blocks are aligned");
    Check(block.size_bytes() == size, "blocks know their size");
    std::memset(block.data(), 1, size);
  }

  Check(AlignedBlock().data() == nullptr, "a block of nothing has no memory");
  Check(AlignedBlock(0).data() == nullptr, "a block of 0 bytes has no memory");

  AlignedBlock first(64);
  void* memory = first.data();
  const AlignedBlock second = std::move(first);
  Check(second.data() == memory, "moving a block moves its memory");

  bool refused = false;
  try {
    // More than any address space, and still a whole number of alignments.
    const AlignedBlock block(std::numeric_limits<size_t>::max() / 2);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  Check(refused, "memory that is not there is bad_alloc");
}
