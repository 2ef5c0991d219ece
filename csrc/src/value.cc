#include "value.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <sstream>

namespace torch_hybrid_backend {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename Dims>
void Print(std::ostream& out, const Dims& dims) {
  out << '(';
  for (size_t i = 0; i < dims.size(); ++i) out << (i == 0 ? "" : ", ") << dims[i];
  out << ')';
}

constexpr const char* kElsewhere = " on another device than the CPU";

int32_t ShimDtype(ScalarType dtype) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

Tensor EmptyOn(int32_t device_type, int32_t device_index, const Layout& layout) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(layout.sizes.size()), layout.sizes.data(), layout.strides.data(),
      ShimDtype(layout.dtype), device_type, device_index, &handle));
  return Tensor(handle);
}

}  // namespace

int64_t Layout::Span() const {
  int64_t span = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    span += (sizes[d] - 1) * strides[d];
  }
  return span;
}

std::string Layout::ToString() const {
  std::ostringstream out;
  out << torch::headeronly::toString(dtype);
  Print(out, sizes);
  out << " with strides ";
  Print(out, strides);
  if (!on_cpu) out << kElsewhere;
  return out.str();
}

Match Compare(const Tensor& tensor, const Layout& expected) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if ((expected.on_cpu && !tensor.is_cpu()) || tensor.scalar_type() != expected.dtype ||
      sizes.size() != expected.sizes.size() ||
      !std::equal(sizes.begin(), sizes.end(), expected.sizes.begin())) {
    return Match::kDifferent;
  }
  if (std::equal(strides.begin(), strides.end(), expected.strides.begin())) return Match::kExact;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return Match::kSameMemory;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != expected.strides[d]) return Match::kOtherStrides;
  }
  return Match::kSameMemory;
}

std::string Describe(const Tensor& tensor) {
  std::ostringstream out;
  out << torch::headeronly::toString(tensor.scalar_type());
  Print(out, tensor.sizes());
  out << " with strides ";
  Print(out, tensor.strides());
  if (!tensor.is_cpu()) out << kElsewhere;
  return out.str();
}

int64_t ElementBytes(ScalarType dtype) {
  return static_cast<int64_t>(aoti_torch_dtype_element_size(ShimDtype(dtype)));
}

DLDataType ToDlpack(ScalarType dtype) {
  const auto type = [](uint8_t code, uint8_t bits) { return DLDataType{code, bits, 1}; };
  switch (dtype) {
    case ScalarType::Bool:
      return type(kDLBool, 8);
    case ScalarType::Byte:
      return type(kDLUInt, 8);
    case ScalarType::UInt16:
      return type(kDLUInt, 16);
    case ScalarType::UInt32:
      return type(kDLUInt, 32);
    case ScalarType::UInt64:
      return type(kDLUInt, 64);
    case ScalarType::Char:
      return type(kDLInt, 8);
    case ScalarType::Short:
      return type(kDLInt, 16);
    case ScalarType::Int:
      return type(kDLInt, 32);
    case ScalarType::Long:
      return type(kDLInt, 64);
    case ScalarType::Half:
      return type(kDLFloat, 16);
    case ScalarType::BFloat16:
      return type(kDLBfloat, 16);
    case ScalarType::Float:
      return type(kDLFloat, 32);
    case ScalarType::Double:
      return type(kDLFloat, 64);
    default:
      // Callbacks may carry any dtype; a kernel refuses this one by its own check.
      return type(kDLOpaqueHandle, 64);
  }
}

Tensor Empty(const Layout& layout) { return EmptyOn(aoti_torch_device_type_cpu(), 0, layout); }

void* HostData(const Tensor& tensor, const Layout& layout) {
  return layout.on_cpu ? tensor.data_ptr() : nullptr;
}

Tensor Over(AlignedBlock block, const Layout& layout, const std::shared_ptr<KeptBlocks>& kept) {
  void* const data = block.data();
  // Shared: a deleter must be copyable, a block is not.
  auto owned = std::make_shared<AlignedBlock>(std::move(block));
  const auto give_back = [owned = std::move(owned), kept = std::weak_ptr(kept)](void*) {
    if (const auto alive = kept.lock()) alive->GiveBack(std::move(*owned));
  };
  return torch::stable::from_blob(data, layout.sizes, layout.strides,
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  layout.dtype, give_back);
}

Tensor Restride(const Tensor& tensor, const Layout& expected) {
  // By number: the stable ABI's own type of devices knows only the commonest.
  int32_t type = 0;
  int32_t index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  Tensor copy = EmptyOn(type, index, expected);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), tensor.get(), /*non_blocking=*/0));
  return copy;
}

Tensor Reinterpret(const Tensor& tensor, const Layout& layout) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      tensor.get(), static_cast<int64_t>(layout.sizes.size()), layout.sizes.data(),
      layout.strides.data(), /*storage_offset (added to the tensor's own)=*/0, &handle));
  return Tensor(handle);
}

}  // namespace torch_hybrid_backend
