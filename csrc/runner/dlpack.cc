#include "dlpack.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "value.h"

namespace torch_hybrid_backend {
namespace {

template <typename Sizes>
std::string Shown(const std::string& dtype, const Sizes& sizes) {
  std::string text = dtype + "(";
  for (const int64_t size : sizes) text += (text.back() == '(' ? "" : ", ") + std::to_string(size);
  return text + ")";
}

// "float32"; for a dtype that torch has not, DLPack's numbers.
std::string NameOf(const ::DLDataType& dtype) {
  for (int number = 0; number < 128; ++number) {
    const auto known = static_cast<Dtype>(number);
    const ::DLDataType as = ToCallersDtype(known);
    if (as.bits == dtype.bits && as.code == dtype.code && as.lanes == dtype.lanes)
      return NameOf(known);
  }
  return "DLPack dtype (code " + std::to_string(dtype.code) + ", " + std::to_string(dtype.bits) +
         " bits, " + std::to_string(dtype.lanes) + " lanes)";
}

std::vector<int64_t> RowMajor(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  return strides;
}

struct Managed {
  ::DLManagedTensorVersioned dlpack;
  Tensor tensor;
};

}  // namespace

::DLDataType ToCallersDtype(Dtype dtype) {
  const auto as = [](int code, int bits, int lanes = 1) {
    return ::DLDataType{static_cast<uint8_t>(code), static_cast<uint8_t>(bits),
                        static_cast<uint16_t>(lanes)};
  };
  switch (dtype) {
    case Dtype::kComplex32:
      return as(::kDLComplex, 32);
    case Dtype::kComplex64:
      return as(::kDLComplex, 64);
    case Dtype::kComplex128:
      return as(::kDLComplex, 128);
    case Dtype::kFloat8E5m2:
      return as(::kDLFloat8_e5m2, 8);
    case Dtype::kFloat8E4m3fn:
      return as(::kDLFloat8_e4m3fn, 8);
    case Dtype::kFloat8E5m2fnuz:
      return as(::kDLFloat8_e5m2fnuz, 8);
    case Dtype::kFloat8E4m3fnuz:
      return as(::kDLFloat8_e4m3fnuz, 8);
    case Dtype::kFloat8E8m0fnu:
      return as(::kDLFloat8_e8m0fnu, 8);
    case Dtype::kFloat4E2m1fnX2:
      return as(::kDLFloat4_e2m1fn, 4, 2);
    default: {
      const DLDataType known = ToDlpack(dtype);
      return as(known.code, known.bits);
    }
  }
}

Tensor FromDlpack(const ::DLTensor& given, const TensorForm& form, const std::string& which) {
  if (given.device.device_type != ::kDLCPU) {
    throw std::runtime_error(which + " is on another device than the CPU (DLPack's device type " +
                             std::to_string(given.device.device_type) + "): copy it to the CPU");
  }
  std::vector<int64_t> sizes(given.shape, given.shape + given.ndim);
  const Dtype dtype = DtypeNamed(form.dtype);
  const ::DLDataType expected = ToCallersDtype(dtype);
  if (given.dtype.code != expected.code || given.dtype.bits != expected.bits ||
      given.dtype.lanes != expected.lanes || sizes != form.sizes) {
    throw std::runtime_error(which + " is " + Shown(NameOf(given.dtype), sizes) +
                             ", but the model was exported for " + Shown(form));
  }
  if (given.data == nullptr && form.span > 0)
    throw std::runtime_error(which + " has no memory: its data is NULL");
  std::vector<int64_t> strides =
      given.strides == nullptr ? RowMajor(sizes)
                               : std::vector<int64_t>(given.strides, given.strides + given.ndim);
  return Tensor(nullptr, static_cast<std::byte*>(given.data) + given.byte_offset, dtype,
                std::move(sizes), std::move(strides));
}

::DLManagedTensorVersioned* ToManaged(Tensor tensor) {
  if (!tensor.owner()) {
    tensor =
        Restride(tensor, Layout{tensor.dtype(), tensor.sizes(), tensor.strides(), Device::Host()});
  }
  auto managed = std::make_unique<Managed>(Managed{{}, std::move(tensor)});
  const Tensor& own = managed->tensor;
  ::DLManagedTensorVersioned& dlpack = managed->dlpack;
  dlpack.version = {1, 0};
  dlpack.manager_ctx = managed.get();
  dlpack.deleter = [](::DLManagedTensorVersioned* self) {
    delete static_cast<Managed*>(self->manager_ctx);
  };
  dlpack.dl_tensor = {own.data_ptr(),
                      {::kDLCPU, 0},
                      static_cast<int32_t>(own.sizes().size()),
                      ToCallersDtype(own.dtype()),
                      const_cast<int64_t*>(own.sizes().data()),
                      const_cast<int64_t*>(own.strides().data()),
                      0};
  return &managed.release()->dlpack;
}

std::string Shown(const TensorForm& form) { return Shown(form.dtype, form.sizes); }

Layout LayoutOf(const TensorForm& form) {
  return Layout{DtypeNamed(form.dtype), form.sizes, form.strides, Device::Host()};
}

}  // namespace torch_hybrid_backend
