// Value: one buffer of a plan, and what the plan knows of it before any call.
//
// Values are plain data, owned by their plan.
#ifndef TORCH_HYBRID_BACKEND_VALUE_H_
#define TORCH_HYBRID_BACKEND_VALUE_H_

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kept_blocks.h"
#include "kernel_abi.h"

namespace torch_hybrid_backend {

// The numbers are those of ValueKind in torch_hybrid_backend/runtime/native/ops.py.
enum class ValueKind : int64_t {
  kInput = 0,     // payload: position among the inputs of a call; copied where its strides differ
  kConstant = 1,  // payload: slot of the binding; only kernels and operators read it
  kArena = 2,     // payload: byte offset in the arena; only kernels read and write it
  kFresh = 3,     // a new tensor in each call
  kReturned = 4,  // a tensor that a callback or operator returns
  kAlias = 5,     // payload: the value whose memory it shares, from its first element on
  kRawInput = 6,  // payload: as kInput; never copied, so that a callback can write to it; only
                  // callbacks read it
};

// Sizes and strides in elements. Of a value that is not on the CPU nothing is asked but that: only
// callbacks and operators read it, which find its device in the tensor, and which device it really
// is is not always known before the call (attention's random seed is on the CPU or on the GPU,
// whatever its fake tensor says). The host never reads such memory and never waits for its device.
struct Layout {
  torch::headeronly::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  bool on_cpu;

  // Elements from the first to the last one addressed; 0 when empty.
  int64_t Span() const;
  std::string ToString() const;
};

struct Value {
  ValueKind kind;
  int64_t payload;
  Layout layout;
  int64_t span;  // == layout.Span(), at a fixed address: DLTensors point at it as their shape
  size_t root;   // the value whose memory it is; itself unless it is an alias
};

// How a tensor's own layout stands to the expected one.
enum class Match { kExact, kSameMemory, kOtherStrides, kDifferent };

// kSameMemory: strides differ only in dimensions of size 1, where they address nothing.
// kDifferent: another dtype or shape, or not on the CPU where it must be.
Match Compare(const torch::stable::Tensor& tensor, const Layout& expected);

std::string Describe(const torch::stable::Tensor& tensor);

int64_t ElementBytes(torch::headeronly::ScalarType dtype);

DLDataType ToDlpack(torch::headeronly::ScalarType dtype);

// A new tensor on the CPU, not initialised.
torch::stable::Tensor Empty(const Layout& layout);

// Where the tensor's elements begin for kernels, null where they are not on the CPU.
void* HostData(const torch::stable::Tensor& tensor, const Layout& layout);

// A tensor over the block, not initialised; the block goes back to `kept`, while that lives, with
// the last tensor that shares its memory.
torch::stable::Tensor Over(AlignedBlock block, const Layout& layout,
                           const std::shared_ptr<KeptBlocks>& kept);

// A copy on the same device with the expected strides; the shape must already be as expected.
torch::stable::Tensor Restride(const torch::stable::Tensor& tensor, const Layout& expected);

// A tensor over the memory of `tensor`, from its first element on.
torch::stable::Tensor Reinterpret(const torch::stable::Tensor& tensor, const Layout& layout);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_VALUE_H_
