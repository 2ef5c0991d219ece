// Value: one buffer of a plan, and what the plan knows of it before any call.
//
// Values are plain data, owned by their plan.
#ifndef TORCH_HYBRID_BACKEND_VALUE_H_
#define TORCH_HYBRID_BACKEND_VALUE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "device.h"
#include "dtype.h"
#include "kept_blocks.h"
#include "tensor.h"

namespace torch_hybrid_backend {

enum class ValueKind {
  kInput,     // payload: position among the inputs of a call; copied where it does not fit
  kConstant,  // payload: slot of the binding
  kArena,     // payload: byte offset in its device's arena; it is no tensor
  kFresh,     // a new tensor in each call
  kReturned,  // a tensor that a callback or operator returns
  kAlias,     // payload: the value whose memory it shares, from the element `offset` on
  kRawInput,  // payload: as kInput; never copied, so that a callback can write to it; only
              // callbacks read it
};

// The kind of that name in a description of a plan; throws std::runtime_error for an unknown one.
ValueKind ValueKindNamed(std::string_view name);

// Sizes and strides in elements. The host never reads memory of another device and never waits for
// one.
struct Layout {
  Dtype dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  Device device;

  // Elements from the first to the last one addressed; 0 when empty. Throws where they are more
  // than 64 bits tell.
  int64_t Span() const;
  std::string ToString() const;
};

struct Value {
  ValueKind kind;
  int64_t payload;
  Layout layout;
  int64_t span;  // == layout.Span(), at a fixed address: DLTensors point at it as their shape
  size_t root;   // the value whose memory it is; itself unless it is an alias
  // Elements before its first one: of an alias in its root, of a constant in its slot.
  int64_t offset;
  // Whether a step is given its address. Which device other values really are on, where it is not
  // the CPU, is for the operators that read them to find out: it is not always known before the
  // call (attention's random seed is on the CPU or on the GPU, whatever its fake tensor says).
  bool addressed = false;

  size_t SizeBytes() const;
};

// How a tensor's own layout stands to the expected one.
enum class Match { kExact, kSameMemory, kCopy, kDifferent };

// kSameMemory: strides differ only in dimensions of size 1, where they address nothing.
// kCopy: other strides, or an address that kernels of a device cannot take (kAddressAlignment): a
// view into a larger tensor may begin anywhere.
// kDifferent: another dtype or shape, not on the CPU where it must be, or on another device than it
// is addressed on.
Match Compare(const Tensor& tensor, const Value& expected);

std::string Describe(const Tensor& tensor);

// What follows is torch/tensor.cc's in `_runtime.so`, and runner/tensor.cc's in the runner.

// A new tensor, not initialised; on a device with streams for work on the current one. Throws
// std::runtime_error, "could not allocate ...", where there is no memory, not even with what
// KeptBlocks kept.
Tensor Empty(const Layout& layout);

// A tensor over the block, which is on the host, not initialised; the block goes back to `kept`,
// while that lives, with the last tensor that shares its memory.
Tensor Over(AlignedBlock block, const Layout& layout, const std::shared_ptr<KeptBlocks>& kept);

// Copies elements between tensors of one shape and dtype, whatever their strides and devices.
void CopyElements(const Tensor& source, const Tensor& destination);

// A copy on the same device with the expected strides; the shape must already be as expected.
Tensor Restride(const Tensor& tensor, const Layout& expected);

// A tensor over the memory of `tensor`, from the element `offset` on.
Tensor Reinterpret(const Tensor& tensor, const Layout& layout, int64_t offset = 0);

// A tensor over memory that somebody else owns, and must keep as long as the tensor is used.
Tensor Borrowed(void* data, const Layout& layout);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_VALUE_H_
