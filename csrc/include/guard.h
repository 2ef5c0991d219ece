// Guard: notices that tensors changed behind the version counter (`p.data.mul_(2)`, a write
// through numpy).
//
// It remembers a few elements of each tensor, spread over its extent, and compares them byte for
// byte. It does not see a change that leaves all of those elements as they were; version counters,
// checked in Python, see most of them.
//
// Ownership: it holds addresses, not tensors, so that it keeps no parameter alive. Whoever asks
// must have made sure that each tensor is alive and still has the data pointer it had when the
// guard was made.
//
// Failure: the constructor throws std::runtime_error for a tensor that is not on the CPU.
#ifndef TORCH_HYBRID_BACKEND_GUARD_H_
#define TORCH_HYBRID_BACKEND_GUARD_H_

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace torch_hybrid_backend {

class Guard {
 public:
  explicit Guard(const std::vector<torch::stable::Tensor>& tensors);

  bool IsStale() const;

 private:
  // complex128 is the widest element.
  static constexpr size_t kMaxElementBytes = 16;
  struct Sample {
    const void* address;
    size_t size_bytes;
    std::array<unsigned char, kMaxElementBytes> value;
  };
  std::vector<Sample> samples_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_GUARD_H_
