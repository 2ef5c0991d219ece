// Arena planning: offsets for buffers in one block of memory, such that buffers alive together
// never overlap.
//
// The largest buffers are placed first, each in the smallest gap that fits between those placed
// already and alive with it ("greedy by size", Pisarchyk & Lee, "Efficient Memory Management for
// Deep Neural Net Inference", 2020; best fit within). Where that takes more than is alive at any
// one time, which no placement can go below, other orders are tried and the best kept: by first
// use, and then again and again with what ended highest placed before all others (a hill climb over
// orders, as in Arm's Vela compiler).
//
// Failure: throws std::runtime_error for an arena of more than 64 bits.
#ifndef TORCH_HYBRID_BACKEND_ARENA_H_
#define TORCH_HYBRID_BACKEND_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_hybrid_backend {

// A buffer of `size_bytes`, alive from step `first` to step `last`, both included.
struct LiveRange {
  int64_t size_bytes;
  int64_t first;
  int64_t last;
};

// All are multiples of the alignment.
struct ArenaLayout {
  std::vector<int64_t> offsets;
  int64_t size_bytes;
};

// Pairs of buffers looked at for a plan that is made once, and for one that a call waits for.
inline constexpr size_t kPairsAhead = 500'000;
inline constexpr size_t kPairsInCall = 20'000;

// Places every buffer; empty ones at offset 0. `most_pairs` bounds the orders that are tried.
ArenaLayout PlanArena(const std::vector<LiveRange>& ranges, int64_t alignment, size_t most_pairs);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_ARENA_H_
