// Values: the buffers of one plan, and what each of them is in a running call.
//
// Use: Add all of them while the plan is built; afterwards they do not change, and any number of
// calls read them at once, each with a frame of its own.
//
// Ownership: plain data; what lives in a call belongs to its frame.
//
// Failure: throws std::runtime_error for a number that is no value, a value that cannot be used as
// asked, and a tensor that does not fit its value.
#ifndef TORCH_HYBRID_BACKEND_VALUES_H_
#define TORCH_HYBRID_BACKEND_VALUES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "frame.h"
#include "value.h"

namespace torch_hybrid_backend {

class Values {
 public:
  size_t Add(ValueKind kind, int64_t payload, Layout layout, int64_t offset = 0);

  size_t size() const { return values_.size(); }
  const Value& operator[](size_t value) const { return values_[value]; }
  const std::vector<size_t>& aliases(size_t root) const { return aliases_[root]; }

  // The number, if it is one of a value.
  size_t Checked(int64_t value) const;
  std::vector<size_t> Checked(const std::vector<int64_t>& values) const;
  // Refuses values that are no tensors of their own. `user`: "a copy reads".
  void RequireTensor(size_t value, const char* user) const;
  // A step is given the value's address, on `device`. `user`: "a kernel".
  void Address(size_t value, const Device& device, const char* user);

  // The bytes before a value's first element.
  size_t OffsetBytes(size_t value) const;
  // Where `root` lies in this call, and all that share its memory.
  void SetData(Frame& frame, size_t root, void* data) const;
  // As SetData, where a step needs the address at all.
  void SetDataOf(Frame& frame, size_t root, const Tensor& tensor) const;
  const Tensor& TensorOf(Frame& frame, size_t value) const;
  // The tensor becomes the value, with its strides. `from` says in errors where it comes from.
  void Receive(Frame& frame, size_t value, Tensor tensor, const std::string& from) const;

 private:
  std::vector<Value> values_;
  std::vector<std::vector<size_t>> aliases_;  // of each root
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_VALUES_H_
