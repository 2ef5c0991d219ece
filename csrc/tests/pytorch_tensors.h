// PyTorch's tensors, dispatcher and streams for tests without LibTorch, whose C interface they
// answer. So that a plan can be run under the sanitisers, and with values on a GPU that is not
// there: the memory of all devices is the host's.
#ifndef TORCH_HYBRID_BACKEND_TESTS_PYTORCH_TENSORS_H_
#define TORCH_HYBRID_BACKEND_TESTS_PYTORCH_TENSORS_H_

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

constexpr int32_t kCpu = 0;
constexpr int32_t kCuda = 1;

// float32 and row-major.
torch::stable::Tensor Floats(const std::vector<int64_t>& sizes, const std::vector<float>& values,
                             int32_t device_type = kCpu, int32_t device_index = 0);
// `count` elements of a tensor's memory from number `first` on.
torch::stable::Tensor ViewOf(const torch::stable::Tensor& tensor, int64_t first, int64_t count);
std::vector<float> Read(const torch::stable::Tensor& tensor);

// What the calling thread uses on every CUDA device.
inline thread_local void* current_stream = nullptr;

// "namespace::operator.overload": takes its arguments from the stack, and leaves its results there.
inline std::map<std::string, std::function<void(StableIValue*)>> operators;

#endif  // TORCH_HYBRID_BACKEND_TESTS_PYTORCH_TENSORS_H_
