#include "operator.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "checked.h"
#include "torch_library.h"
#include "value.h"
#include "worker_threads.h"

namespace torch_hybrid_backend {
namespace {

// What a call returns, as it is taken.
struct Taken {
  const std::vector<const Tensor*>& given;
  std::vector<Operator::Tensors> results;
  std::exception_ptr failure;
};

// True if the memory is that of a borrowed tensor: a view of it must be copied where it outlives
// the call.
bool IsBorrowed(const void* data, const std::vector<const Tensor*>& given) {
  return std::any_of(given.begin(), given.end(), [&](const Tensor* tensor) {
    const auto* const begin = static_cast<const std::byte*>(tensor->data_ptr());
    const int64_t bytes =
        SpanOf(tensor->sizes(), tensor->strides()) * ElementBytes(tensor->dtype());
    return !tensor->owner() && data >= begin && data < begin + bytes;
  });
}

void Take(void* context, size_t result, const HandedTensor* handed) {
  Taken& taken = *static_cast<Taken*>(context);
  try {
    std::shared_ptr<void> owner;
    if (handed->release != nullptr) owner.reset(handed->owner, handed->release);
    if (taken.results.size() <= result) taken.results.resize(result + 1);
    Operator::Tensors& tensors = taken.results[result];
    if (handed->dimensions < 0) {
      // One without elements stands for it, which no value expects.
      tensors.emplace_back(nullptr, nullptr, Dtype::kUint8, std::vector<int64_t>{0},
                           std::vector<int64_t>{1});
      return;
    }
    if (IsBorrowed(handed->data, taken.given)) owner.reset();
    tensors.emplace_back(
        std::move(owner), handed->data, static_cast<Dtype>(handed->dtype),
        std::vector<int64_t>(handed->sizes, handed->sizes + handed->dimensions),
        std::vector<int64_t>(handed->strides, handed->strides + handed->dimensions));
  } catch (...) {
    taken.failure = std::current_exception();
  }
}

HandedTensor Handed(const Tensor& tensor) {
  HandedTensor handed{};
  handed.data = tensor.data_ptr();
  handed.sizes = tensor.sizes().data();
  handed.strides = tensor.strides().data();
  handed.dimensions = static_cast<int32_t>(tensor.sizes().size());
  handed.dtype = static_cast<int32_t>(tensor.dtype());
  if (tensor.owner()) {
    // A result may be a view of it, and outlive the plan's.
    handed.owner = new std::shared_ptr<void>(tensor.owner());
    handed.release = [](void* owner) { delete static_cast<std::shared_ptr<void>*>(owner); };
  }
  return handed;
}

class TorchOperator final : public Operator {
 public:
  explicit TorchOperator(const Json& description)
      : name_(description["name"].AsString()), torch_(Torch()), made_(Make(description)) {}
  ~TorchOperator() override { torch_.free(made_); }

  std::vector<Tensors> Call(const std::vector<const Tensor*>& given) const override {
    std::vector<HandedTensor> handed;
    handed.reserve(given.size());
    for (const Tensor* tensor : given) handed.push_back(Handed(*tensor));
    Taken taken{given, {}, nullptr};
    if (torch_.call(made_, handed.data(), handed.size(), ThreadCount(), &Take, &taken) != 0)
      throw std::runtime_error(name_ + ": " + torch_.error());
    if (taken.failure) std::rethrow_exception(taken.failure);
    return std::move(taken.results);
  }

 private:
  void* Make(const Json& description) const {
    const std::string text = description.ToText();
    void* const made = torch_.make(text.data(), text.size());
    if (made == nullptr) throw std::runtime_error(name_ + ": " + torch_.error());
    return made;
  }

  const std::string name_;
  const TorchFunctions& torch_;
  void* const made_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(const Json& description, const Device& /*device*/) {
  return std::make_unique<TorchOperator>(description);
}

}  // namespace torch_hybrid_backend
