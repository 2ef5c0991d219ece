#include "tensor.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "value.h"

namespace torch_hybrid_backend {
namespace {

using torch::headeronly::ScalarType;

constexpr bool IsNumbered(Dtype dtype, ScalarType as) {
  return static_cast<int>(dtype) == static_cast<int>(as);
}
static_assert(IsNumbered(Dtype::kUint8, ScalarType::Byte) &&
              IsNumbered(Dtype::kInt8, ScalarType::Char) &&
              IsNumbered(Dtype::kInt16, ScalarType::Short) &&
              IsNumbered(Dtype::kInt32, ScalarType::Int) &&
              IsNumbered(Dtype::kInt64, ScalarType::Long) &&
              IsNumbered(Dtype::kFloat16, ScalarType::Half) &&
              IsNumbered(Dtype::kFloat32, ScalarType::Float) &&
              IsNumbered(Dtype::kFloat64, ScalarType::Double) &&
              IsNumbered(Dtype::kComplex32, ScalarType::ComplexHalf) &&
              IsNumbered(Dtype::kComplex64, ScalarType::ComplexFloat) &&
              IsNumbered(Dtype::kComplex128, ScalarType::ComplexDouble) &&
              IsNumbered(Dtype::kBool, ScalarType::Bool) &&
              IsNumbered(Dtype::kBfloat16, ScalarType::BFloat16) &&
              IsNumbered(Dtype::kFloat8E5m2, ScalarType::Float8_e5m2) &&
              IsNumbered(Dtype::kFloat8E4m3fn, ScalarType::Float8_e4m3fn) &&
              IsNumbered(Dtype::kFloat8E5m2fnuz, ScalarType::Float8_e5m2fnuz) &&
              IsNumbered(Dtype::kFloat8E4m3fnuz, ScalarType::Float8_e4m3fnuz) &&
              IsNumbered(Dtype::kUint16, ScalarType::UInt16) &&
              IsNumbered(Dtype::kUint32, ScalarType::UInt32) &&
              IsNumbered(Dtype::kUint64, ScalarType::UInt64) &&
              IsNumbered(Dtype::kFloat8E8m0fnu, ScalarType::Float8_e8m0fnu) &&
              IsNumbered(Dtype::kFloat4E2m1fnX2, ScalarType::Float4_e2m1fn_x2));

int32_t ShimDtype(Dtype dtype) {
  return torch::stable::detail::to<int32_t>(
      torch::stable::detail::from(static_cast<ScalarType>(dtype)));
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

}  // namespace

Device DeviceOf(const Tensor& tensor) {
  // By number: the stable ABI's own type of devices knows only the commonest.
  Device device{0, 0, false};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  if (device.type == aoti_torch_device_type_cpu()) return Device::Host();
  device.index = std::max(device.index, 0);
  return device;
}

void* MemoryOf(const Tensor& tensor) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout == aoti_torch_layout_strided() ? tensor.mutable_data_ptr() : nullptr;
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
                                  static_cast<ScalarType>(layout.dtype), give_back);
}

void CopyElements(const Tensor& source, const Tensor& destination) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(destination.get(), source.get(), /*non_blocking=*/0));
}

Tensor Restride(const Tensor& tensor, const Layout& expected) {
  Tensor copy = EmptyOn(DeviceOf(tensor), expected);
  CopyElements(tensor, copy);
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
