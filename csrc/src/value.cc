#include "value.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

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

void PrintDevice(std::ostream& out, const Device& device) {
  if (!device.is_host) out << " on another device than the CPU (" << device.ToString() << ')';
}

int32_t ShimDtype(ScalarType dtype) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

Tensor EmptyOn(const Device& device, const Layout& layout) {
  AtenTensorHandle handle = nullptr;
  const auto allocate = [&] {
    return aoti_torch_empty_strided(static_cast<int64_t>(layout.sizes.size()), layout.sizes.data(),
                                    layout.strides.data(), ShimDtype(layout.dtype), device.type,
                                    device.index, &handle) == AOTI_TORCH_SUCCESS;
  };
  if (allocate() || (device.is_host && KeptBlocks::FreeIdle() && allocate())) return Tensor(handle);
  // PyTorch's stable interface tells no reason.
  throw std::runtime_error("could not allocate a tensor of " + layout.ToString() + " on " +
                           device.ToString());
}

// As torch names them, without the quantized ones.
constexpr std::pair<std::string_view, ScalarType> kDtypes[] = {
    {"bool", ScalarType::Bool},
    {"uint8", ScalarType::Byte},
    {"uint16", ScalarType::UInt16},
    {"uint32", ScalarType::UInt32},
    {"uint64", ScalarType::UInt64},
    {"int8", ScalarType::Char},
    {"int16", ScalarType::Short},
    {"int32", ScalarType::Int},
    {"int64", ScalarType::Long},
    {"float16", ScalarType::Half},
    {"bfloat16", ScalarType::BFloat16},
    {"float32", ScalarType::Float},
    {"float64", ScalarType::Double},
    {"complex32", ScalarType::ComplexHalf},
    {"complex64", ScalarType::ComplexFloat},
    {"complex128", ScalarType::ComplexDouble},
    {"float8_e5m2", ScalarType::Float8_e5m2},
    {"float8_e4m3fn", ScalarType::Float8_e4m3fn},
    {"float8_e5m2fnuz", ScalarType::Float8_e5m2fnuz},
    {"float8_e4m3fnuz", ScalarType::Float8_e4m3fnuz},
    {"float8_e8m0fnu", ScalarType::Float8_e8m0fnu},
    {"float4_e2m1fn_x2", ScalarType::Float4_e2m1fn_x2},
};

constexpr std::pair<std::string_view, ValueKind> kKinds[] = {
    {"input", ValueKind::kInput},       {"constant", ValueKind::kConstant},
    {"arena", ValueKind::kArena},       {"fresh", ValueKind::kFresh},
    {"returned", ValueKind::kReturned}, {"alias", ValueKind::kAlias},
    {"raw_input", ValueKind::kRawInput}};

template <typename Named, size_t N>
Named Find(const std::pair<std::string_view, Named> (&names)[N], std::string_view name,
           const char* noun) {
  for (const auto& [known, named] : names) {
    if (known == name) return named;
  }
  throw std::runtime_error(std::string("plans know no ") + noun + " \"" + std::string(name) + "\"");
}

}  // namespace

ValueKind ValueKindNamed(std::string_view name) { return Find(kKinds, name, "kind of value"); }

ScalarType DtypeNamed(std::string_view name) { return Find(kDtypes, name, "dtype"); }

size_t Value::SizeBytes() const { return static_cast<size_t>(span * ElementBytes(layout.dtype)); }

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
  PrintDevice(out, device);
  return out.str();
}

Device DeviceOf(const Tensor& tensor) {
  // By number: the stable ABI's own type of devices knows only the commonest.
  Device device{0, 0, false};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  if (device.type == aoti_torch_device_type_cpu()) return Device::Host();
  device.index = std::max(device.index, 0);
  return device;
}

Match Compare(const Tensor& tensor, const Value& value) {
  const Layout& expected = value.layout;
  if (expected.device.is_host ? !tensor.is_cpu()
                              : value.addressed && DeviceOf(tensor) != expected.device) {
    return Match::kDifferent;
  }
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (tensor.scalar_type() != expected.dtype || sizes.size() != expected.sizes.size() ||
      !std::equal(sizes.begin(), sizes.end(), expected.sizes.begin())) {
    return Match::kDifferent;
  }
  if (value.addressed && !expected.device.is_host &&
      reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAddressAlignment != 0) {
    return Match::kCopy;
  }
  if (std::equal(strides.begin(), strides.end(), expected.strides.begin())) return Match::kExact;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return Match::kSameMemory;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != expected.strides[d]) return Match::kCopy;
  }
  return Match::kSameMemory;
}

std::string Describe(const Tensor& tensor) {
  std::ostringstream out;
  out << torch::headeronly::toString(tensor.scalar_type());
  Print(out, tensor.sizes());
  out << " with strides ";
  Print(out, tensor.strides());
  PrintDevice(out, DeviceOf(tensor));
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

Tensor Empty(const Layout& layout) { return EmptyOn(layout.device, layout); }

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
  Tensor copy = EmptyOn(DeviceOf(tensor), expected);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), tensor.get(), /*non_blocking=*/0));
  return copy;
}

Tensor Reinterpret(const Tensor& tensor, const Layout& layout, int64_t offset) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      tensor.get(), static_cast<int64_t>(layout.sizes.size()), layout.sizes.data(),
      layout.strides.data(), /*storage_offset (added to the tensor's own)=*/offset, &handle));
  return Tensor(handle);
}

Tensor Borrowed(void* data, const Layout& layout) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      data, static_cast<int64_t>(layout.sizes.size()), layout.sizes.data(), layout.strides.data(),
      /*storage_offset=*/0, ShimDtype(layout.dtype), layout.device.type, layout.device.index,
      &handle));
  return Tensor(handle);
}

}  // namespace torch_hybrid_backend
