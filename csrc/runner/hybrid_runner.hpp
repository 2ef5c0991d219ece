// hybrid::Model: hybrid_runner.h for C++17 and later, header only.
//
//   hybrid::Model model("model.hybrid");
//   std::vector<float> pixels(3 * 224 * 224);
//   const auto outputs = model.Run({hybrid::Input(pixels.data(), {1, 3, 224, 224})});
//   const float* logits = outputs[0].data<float>();
//
// Ownership: a model closes its file, an output frees its memory; an input borrows the caller's.
//
// Failure: throws hybrid::Error with the runner's text.
#ifndef HYBRID_RUNNER_HPP_
#define HYBRID_RUNNER_HPP_

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hybrid_runner.h"

namespace hybrid {

class Error : public std::runtime_error {
 public:
  Error() : std::runtime_error(hybrid_error()) {}
};

// A tensor of the caller's, row-major unless `strides` says otherwise.
class Input {
 public:
  template <typename T>
  Input(T* data, std::vector<int64_t> sizes, std::vector<int64_t> strides = {})
      : Input(const_cast<std::remove_const_t<T>*>(data), DtypeOf<std::remove_const_t<T>>(),
              std::move(sizes), std::move(strides)) {}
  // For dtypes that C++ has no type for.
  Input(void* data, DLDataType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides = {})
      : data_(data), dtype_(dtype), sizes_(std::move(sizes)), strides_(std::move(strides)) {}

  // Borrows from this object.
  DLTensor AsDlpack() const {
    DLTensor tensor{};
    tensor.data = data_;
    tensor.device = {kDLCPU, 0};
    tensor.ndim = static_cast<int32_t>(sizes_.size());
    tensor.dtype = dtype_;
    tensor.shape = const_cast<int64_t*>(sizes_.data());
    tensor.strides = strides_.empty() ? nullptr : const_cast<int64_t*>(strides_.data());
    return tensor;
  }

 private:
  template <typename T>
  static constexpr DLDataType DtypeOf() {
    static_assert(std::is_arithmetic_v<T>, "give the DLDataType for other types");
    const auto code = std::is_same_v<T, bool>       ? kDLBool
                      : std::is_floating_point_v<T> ? kDLFloat
                      : std::is_signed_v<T>         ? kDLInt
                                                    : kDLUInt;
    return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * sizeof(T)), 1};
  }

  void* data_;
  DLDataType dtype_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

// A result, which owns its memory.
class Output {
 public:
  explicit Output(DLManagedTensorVersioned* tensor) : tensor_(tensor) {}

  const DLTensor& dlpack() const { return tensor_->dl_tensor; }
  template <typename T>
  const T* data() const {
    return reinterpret_cast<const T*>(static_cast<const char*>(dlpack().data) +
                                      dlpack().byte_offset);
  }
  std::vector<int64_t> sizes() const { return {dlpack().shape, dlpack().shape + dlpack().ndim}; }
  std::vector<int64_t> strides() const {
    return {dlpack().strides, dlpack().strides + dlpack().ndim};
  }
  // Hands the tensor over: the caller calls its deleter.
  DLManagedTensorVersioned* release() { return tensor_.release(); }

 private:
  struct Delete {
    void operator()(DLManagedTensorVersioned* tensor) const { tensor->deleter(tensor); }
  };
  std::unique_ptr<DLManagedTensorVersioned, Delete> tensor_;
};

class Model {
 public:
  explicit Model(const std::string& path, const HybridOptions& options = HYBRID_OPTIONS_DEFAULT)
      : model_(hybrid_open(path.c_str(), &options)) {
    if (!model_) throw Error();
  }

  // `entry`: "" for the first one.
  HybridEntry Describe(const std::string& entry = "") const {
    HybridEntry described{};
    described.struct_size = sizeof(described);
    if (hybrid_describe(model_.get(), entry.empty() ? nullptr : entry.c_str(), &described) != 0)
      throw Error();
    return described;
  }

  std::vector<Output> Run(const std::vector<Input>& inputs, const std::string& entry = "") {
    std::vector<DLTensor> tensors;
    for (const Input& input : inputs) tensors.push_back(input.AsDlpack());
    std::vector<const DLTensor*> pointers;
    for (const DLTensor& tensor : tensors) pointers.push_back(&tensor);
    std::vector<DLManagedTensorVersioned*> results(Describe(entry).output_count);
    if (hybrid_run(model_.get(), entry.empty() ? nullptr : entry.c_str(), pointers.data(),
                   pointers.size(), results.data(), results.size()) != 0) {
      throw Error();
    }
    std::vector<Output> outputs;
    outputs.reserve(results.size());
    for (DLManagedTensorVersioned* result : results) outputs.emplace_back(result);
    return outputs;
  }

  void Reset() {
    if (hybrid_reset(model_.get()) != 0) throw Error();
  }

  HybridModel* get() const { return model_.get(); }

 private:
  struct Close {
    void operator()(HybridModel* model) const { hybrid_close(model); }
  };
  std::unique_ptr<HybridModel, Close> model_;
};

}  // namespace hybrid

#endif  // HYBRID_RUNNER_HPP_
