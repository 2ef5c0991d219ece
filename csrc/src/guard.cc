#include "guard.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace torch_hybrid_backend {
namespace {

constexpr int64_t kSamplesPerTensor = 8;
// A sample is 10 to 25 ns of waiting for memory, waking the other threads about a microsecond.
constexpr int64_t kSamplesPerTask = 512;

// Offset in elements of the `index`-th element in row-major order.
int64_t Offset(int64_t index, torch::headeronly::IntHeaderOnlyArrayRef sizes,
               torch::headeronly::IntHeaderOnlyArrayRef strides) {
  int64_t offset = 0;
  for (size_t d = sizes.size(); d-- > 0;) {
    offset += index % sizes[d] * strides[d];
    index /= sizes[d];
  }
  return offset;
}

}  // namespace

Guard::Guard(const std::vector<torch::stable::Tensor>& tensors) {
  samples_.reserve(tensors.size() * kSamplesPerTensor);
  for (const torch::stable::Tensor& tensor : tensors) {
    if (!tensor.is_cpu()) throw std::runtime_error("only tensors on the CPU can be guarded");
    const int64_t numel = tensor.numel();
    const size_t bytes = tensor.element_size();
    const auto* data = static_cast<const char*>(tensor.const_data_ptr());
    const int64_t count = std::min(numel, kSamplesPerTensor);
    for (int64_t i = 0; i < count; ++i) {
      // First and last element included. 1 below: a single sample has no spread.
      const int64_t index = i * (numel - 1) / std::max<int64_t>(count - 1, 1);
      Sample sample{data + Offset(index, tensor.sizes(), tensor.strides()) * bytes, bytes, {}};
      std::memcpy(sample.value.data(), sample.address, bytes);
      samples_.push_back(sample);
    }
  }
}

bool Guard::IsStale() const {
  std::atomic<bool> stale{false};
  const auto compare = [&](int64_t begin, int64_t end) {
    const bool differs =
        std::any_of(samples_.begin() + begin, samples_.begin() + end, [](const Sample& sample) {
          return std::memcmp(sample.address, sample.value.data(), sample.size_bytes) != 0;
        });
    if (differs) stale.store(true, std::memory_order_relaxed);
  };
  torch::stable::parallel_for(0, static_cast<int64_t>(samples_.size()), kSamplesPerTask, compare);
  return stale.load(std::memory_order_relaxed);
}

}  // namespace torch_hybrid_backend
