#include "values.h"

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <utility>

#include "checked.h"

namespace torch_hybrid_backend {
namespace {

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

}  // namespace

size_t Values::Add(ValueKind kind, int64_t payload, Layout layout, int64_t offset) {
  if (layout.sizes.size() != layout.strides.size())
    Refuse("a value needs one stride for each size");
  if (payload < 0) Refuse("a value's payload cannot be negative");
  if (offset < 0 || (offset > 0 && kind != ValueKind::kAlias && kind != ValueKind::kConstant)) {
    Refuse("only aliases and constants begin after the first element of their memory");
  }
  const size_t number = values_.size();
  size_t root = number;
  const int64_t span = layout.Span();
  CheckedProduct(span, ElementBytes(layout.dtype));  // later it is multiplied unchecked
  if (kind == ValueKind::kAlias) {
    root = values_[Checked(payload)].root;
    const Value& shared = values_[root];
    if (shared.kind == ValueKind::kRawInput) Refuse("an input passed as it is cannot be aliased");
    if (shared.layout.dtype != layout.dtype || shared.layout.device != layout.device ||
        CheckedSum(offset, span) > shared.span) {
      Refuse("an alias must have the dtype and device of the value it aliases and fit in it");
    }
  }
  values_.push_back({kind, payload, std::move(layout), span, root, offset});
  aliases_.emplace_back();
  if (root != number) aliases_[root].push_back(number);
  return number;
}

size_t Values::Checked(int64_t value) const {
  if (value < 0 || value >= static_cast<int64_t>(values_.size())) {
    Refuse("the plan has no value " + std::to_string(value));
  }
  return value;
}

std::vector<size_t> Values::Checked(const std::vector<int64_t>& values) const {
  std::vector<size_t> checked;
  checked.reserve(values.size());
  for (const int64_t value : values) checked.push_back(Checked(value));
  return checked;
}

void Values::RequireTensor(size_t value, const char* user) const {
  const ValueKind kind = values_[values_[value].root].kind;
  if (kind == ValueKind::kConstant || kind == ValueKind::kArena) {
    Refuse(std::string(user) + " value " + std::to_string(value) +
           ", which is a constant or in the arena and must be a tensor");
  }
}

void Values::Address(size_t value, const Device& device, const char* user) {
  if (values_[value].kind == ValueKind::kRawInput)
    Refuse(std::string(user) + " cannot read a raw input");
  if (values_[value].layout.device != device) {
    Refuse(std::string(user) + " on " + device.ToString() +
           " cannot read a value that is elsewhere: value " + std::to_string(value) + " is " +
           values_[value].layout.ToString());
  }
  values_[values_[value].root].addressed = true;
}

void Values::SetData(Frame& frame, size_t root, void* data) const {
  // An empty tensor has no memory, but vectors read its first element where a guard then drops it.
  alignas(64) static std::byte nothing[256];
  if (data == nullptr && values_[root].layout.device.is_host) data = nothing;
  frame.views[root].data = data;
  for (const size_t alias : aliases_[root])
    frame.views[alias].data = static_cast<std::byte*>(data) + OffsetBytes(alias);
}

size_t Values::OffsetBytes(size_t value) const {
  const Value& of = values_[value];
  return of.offset == 0 ? 0 : static_cast<size_t>(of.offset * ElementBytes(of.layout.dtype));
}

void Values::SetDataOf(Frame& frame, size_t root, const Tensor& tensor) const {
  const Value& value = values_[root];
  if (value.layout.device.is_host || value.addressed) SetData(frame, root, tensor.data_ptr());
}

const Tensor& Values::TensorOf(Frame& frame, size_t value) const {
  std::optional<Tensor>& tensor = frame.tensors[value];
  if (!tensor) {
    const std::optional<Tensor>& shared = frame.tensors[values_[value].root];
    if (!shared) Refuse("value " + std::to_string(value) + " is read before it is written");
    tensor = Reinterpret(*shared, values_[value].layout, values_[value].offset);
  }
  return *tensor;
}

void Values::Receive(Frame& frame, size_t value, Tensor tensor, const std::string& from) const {
  const Value& expected = values_[value];
  const Match match = Compare(tensor, expected);
  if (match == Match::kDifferent) {
    Refuse(from + " is " + Describe(tensor) + " instead of " + expected.layout.ToString());
  }
  if (match == Match::kExact) {
    frame.tensors[value] = std::move(tensor);
  } else {
    frame.tensors[value] = match == Match::kSameMemory ? Reinterpret(tensor, expected.layout)
                                                       : Restride(tensor, expected.layout);
  }
  SetDataOf(frame, value, *frame.tensors[value]);
}

}  // namespace torch_hybrid_backend
