#include "value.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "checked.h"

namespace torch_hybrid_backend {
namespace {

template <typename Dims>
void Print(std::ostream& out, const Dims& dims) {
  out << '(';
  for (size_t i = 0; i < dims.size(); ++i) out << (i == 0 ? "" : ", ") << dims[i];
  out << ')';
}

void PrintDevice(std::ostream& out, const Device& device) {
  if (!device.is_host) out << " on another device than the CPU (" << device.ToString() << ')';
}

constexpr std::pair<std::string_view, ValueKind> kKinds[] = {
    {"input", ValueKind::kInput},       {"constant", ValueKind::kConstant},
    {"arena", ValueKind::kArena},       {"fresh", ValueKind::kFresh},
    {"returned", ValueKind::kReturned}, {"alias", ValueKind::kAlias},
    {"raw_input", ValueKind::kRawInput}};

}  // namespace

ValueKind ValueKindNamed(std::string_view name) {
  for (const auto& [known, kind] : kKinds) {
    if (known == name) return kind;
  }
  throw std::runtime_error("plans know no kind of value \"" + std::string(name) + "\"");
}

size_t Value::SizeBytes() const { return static_cast<size_t>(span * ElementBytes(layout.dtype)); }

int64_t Layout::Span() const { return SpanOf(sizes, strides); }

std::string Layout::ToString() const {
  std::ostringstream out;
  out << NameOf(dtype);
  Print(out, sizes);
  out << " with strides ";
  Print(out, strides);
  PrintDevice(out, device);
  return out.str();
}

Match Compare(const Tensor& tensor, const Value& value) {
  const Layout& expected = value.layout;
  if (expected.device.is_host ? !IsOnHost(tensor)
                              : value.addressed && DeviceOf(tensor) != expected.device) {
    return Match::kDifferent;
  }
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (DtypeOf(tensor) != expected.dtype || sizes.size() != expected.sizes.size() ||
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
  out << NameOf(DtypeOf(tensor));
  Print(out, tensor.sizes());
  out << " with strides ";
  Print(out, tensor.strides());
  PrintDevice(out, DeviceOf(tensor));
  return out.str();
}

}  // namespace torch_hybrid_backend
