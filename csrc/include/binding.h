// Binding: the constants one plan reads, immutable once made.
//
// Ownership: it shares packed tensors and its guard; borrowed pointers are parameters that the
// caller keeps alive during each call and whose address the caller has checked. A binding replaced
// by one thread lives on while another runs with it, because runs share it.
//
// Failure: the constructor throws std::runtime_error where a slot is filled twice, not at all, or
// does not exist.
#ifndef TORCH_HYBRID_BACKEND_BINDING_H_
#define TORCH_HYBRID_BACKEND_BINDING_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "tensor.h"

namespace torch_hybrid_backend {

// Tells that constants changed, so that those made from them are no longer good. Threads may ask at
// once.
class StaleCheck {
 public:
  virtual ~StaleCheck() = default;
  virtual bool IsStale() const = 0;
};

class Binding {
 public:
  // `owned[i]` fills `owned_slots[i]`, the address `borrowed[i]` fills `borrowed_slots[i]`.
  // `guard`: null where constants never change.
  Binding(std::shared_ptr<const StaleCheck> guard, int64_t slots,
          const std::vector<int64_t>& owned_slots, std::vector<Tensor> owned,
          const std::vector<int64_t>& borrowed_slots, const std::vector<int64_t>& borrowed);

  bool IsStale() const { return guard_ && guard_->IsStale(); }
  // Null for a tensor that has no memory of its own that others could read (oneDNN's packed
  // weights).
  void* data(size_t slot) const { return data_[slot]; }
  // Throws std::runtime_error for a slot that is borrowed.
  const Tensor& tensor(size_t slot) const;
  size_t size() const { return data_.size(); }

 private:
  void Fill(int64_t slot, void* data);

  std::shared_ptr<const StaleCheck> guard_;
  std::vector<Tensor> owned_;
  std::vector<int64_t> owned_slots_;
  std::vector<void*> data_;
  std::vector<bool> filled_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_BINDING_H_
