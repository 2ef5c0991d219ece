#include "binding.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch_hybrid_backend {

Binding::Binding(std::shared_ptr<const StaleCheck> guard, int64_t slots,
                 const std::vector<int64_t>& owned_slots, std::vector<Tensor> owned,
                 const std::vector<int64_t>& borrowed_slots, const std::vector<int64_t>& borrowed)
    : guard_(std::move(guard)),
      owned_(std::move(owned)),
      owned_slots_(owned_slots),
      data_(slots),
      filled_(slots) {
  if (owned_slots.size() != owned_.size() || borrowed_slots.size() != borrowed.size()) {
    throw std::runtime_error("a binding needs one slot for each constant");
  }
  for (size_t i = 0; i < owned_.size(); ++i) Fill(owned_slots[i], MemoryOf(owned_[i]));
  for (size_t i = 0; i < borrowed.size(); ++i) {
    Fill(borrowed_slots[i], reinterpret_cast<void*>(borrowed[i]));
  }
  if (std::find(filled_.begin(), filled_.end(), false) != filled_.end()) {
    throw std::runtime_error("a binding must fill every constant slot of its plan");
  }
}

void Binding::Fill(int64_t slot, void* data) {
  if (slot < 0 || slot >= static_cast<int64_t>(data_.size()) || filled_[slot]) {
    throw std::runtime_error("constant slot " + std::to_string(slot) + " of " +
                             std::to_string(data_.size()) + " does not exist or is filled twice");
  }
  data_[slot] = data;
  filled_[slot] = true;
}

const Tensor& Binding::tensor(size_t slot) const {
  const auto found =
      std::find(owned_slots_.begin(), owned_slots_.end(), static_cast<int64_t>(slot));
  if (found == owned_slots_.end()) {
    throw std::runtime_error("constant slot " + std::to_string(slot) + " is borrowed");
  }
  return owned_[found - owned_slots_.begin()];
}

}  // namespace torch_hybrid_backend
