#include "dtype.h"

#include <array>
#include <cstddef>
#include <stdexcept>

namespace torch_hybrid_backend {
namespace {

struct Known {
  std::string_view name;
  Dtype dtype;
  int64_t bytes;
  DLDataType dlpack;
};

// Callbacks may carry any dtype; a kernel refuses this one by its own check.
constexpr DLDataType kOpaque = {kDLOpaqueHandle, 64, 1};

// Without the quantized ones.
constexpr Known kDtypes[] = {
    {"bool", Dtype::kBool, 1, {kDLBool, 8, 1}},
    {"uint8", Dtype::kUint8, 1, {kDLUInt, 8, 1}},
    {"uint16", Dtype::kUint16, 2, {kDLUInt, 16, 1}},
    {"uint32", Dtype::kUint32, 4, {kDLUInt, 32, 1}},
    {"uint64", Dtype::kUint64, 8, {kDLUInt, 64, 1}},
    {"int8", Dtype::kInt8, 1, {kDLInt, 8, 1}},
    {"int16", Dtype::kInt16, 2, {kDLInt, 16, 1}},
    {"int32", Dtype::kInt32, 4, {kDLInt, 32, 1}},
    {"int64", Dtype::kInt64, 8, {kDLInt, 64, 1}},
    {"float16", Dtype::kFloat16, 2, {kDLFloat, 16, 1}},
    {"bfloat16", Dtype::kBfloat16, 2, {kDLBfloat, 16, 1}},
    {"float32", Dtype::kFloat32, 4, {kDLFloat, 32, 1}},
    {"float64", Dtype::kFloat64, 8, {kDLFloat, 64, 1}},
    {"complex32", Dtype::kComplex32, 4, kOpaque},
    {"complex64", Dtype::kComplex64, 8, kOpaque},
    {"complex128", Dtype::kComplex128, 16, kOpaque},
    {"float8_e5m2", Dtype::kFloat8E5m2, 1, kOpaque},
    {"float8_e4m3fn", Dtype::kFloat8E4m3fn, 1, kOpaque},
    {"float8_e5m2fnuz", Dtype::kFloat8E5m2fnuz, 1, kOpaque},
    {"float8_e4m3fnuz", Dtype::kFloat8E4m3fnuz, 1, kOpaque},
    {"float8_e8m0fnu", Dtype::kFloat8E8m0fnu, 1, kOpaque},
    {"float4_e2m1fn_x2", Dtype::kFloat4E2m1fnX2, 1, kOpaque},
};

// The place in kDtypes of each number.
constexpr auto kPlaces = [] {
  std::array<const Known*, 128> places{};
  for (const Known& known : kDtypes) places[static_cast<size_t>(known.dtype)] = &known;
  return places;
}();

const Known* Find(Dtype dtype) {
  const auto number = static_cast<size_t>(dtype);
  return number < kPlaces.size() ? kPlaces[number] : nullptr;
}

}  // namespace

Dtype DtypeNamed(std::string_view name) {
  for (const Known& known : kDtypes) {
    if (known.name == name) return known.dtype;
  }
  throw std::runtime_error("plans know no dtype \"" + std::string(name) + "\"");
}

std::string NameOf(Dtype dtype) {
  const Known* const known = Find(dtype);
  return known == nullptr ? "dtype " + std::to_string(static_cast<int>(dtype))
                          : std::string(known->name);
}

int64_t ElementBytes(Dtype dtype) {
  const Known* const known = Find(dtype);
  if (known == nullptr) throw std::runtime_error("plans know no elements of " + NameOf(dtype));
  return known->bytes;
}

DLDataType ToDlpack(Dtype dtype) {
  const Known* const known = Find(dtype);
  return known == nullptr ? kOpaque : known->dlpack;
}

}  // namespace torch_hybrid_backend
