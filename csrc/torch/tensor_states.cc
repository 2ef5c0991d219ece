#include "tensor_states.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>

namespace torch_hybrid_backend {
namespace {

// Functions of libtorch's whose only argument is the tensor that a handle points at.
struct Readers {
  bool (*is_inference)(const AtenTensorOpaque*);  // at::native::is_inference
  int64_t (*version)(const AtenTensorOpaque*);    // at::TensorBase::_version
  bool (*requires_grad)(const void*);             // c10::TensorImpl::requires_grad; may be null
};

std::optional<Readers> FindReaders() {
  // In the very library that the functions called here are in: it is not among the global symbols.
  Dl_info found;
  if (dladdr(reinterpret_cast<void*>(&aoti_torch_get_data_ptr), &found) == 0) return std::nullopt;
  void* const library = dlopen(found.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return std::nullopt;
  Readers readers;
  readers.is_inference = reinterpret_cast<decltype(readers.is_inference)>(
      dlsym(library, "_ZN2at6native12is_inferenceERKNS_6TensorE"));
  readers.version =
      reinterpret_cast<decltype(readers.version)>(dlsym(library, "_ZNK2at10TensorBase8_versionEv"));
  readers.requires_grad = reinterpret_cast<decltype(readers.requires_grad)>(
      dlsym(library, "_ZNK3c1010TensorImpl13requires_gradEv"));
  dlclose(library);  // the process keeps it: this library is linked to it
  if (readers.is_inference == nullptr || readers.version == nullptr) return std::nullopt;
  return readers;
}

const std::optional<Readers>& TensorReaders() {
  static const std::optional<Readers> readers = FindReaders();
  return readers;
}

struct Form {
  int32_t dtype = 0;
  int32_t device = 0;
  int32_t device_index = 0;
  int32_t layout = 0;
  bool requires_grad = false;
  int64_t keys = 0;
  int64_t dim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
};

// No value for a tensor that has no sizes or strides of this kind.
std::optional<Form> FormOf(AtenTensorHandle tensor, ptrdiff_t keys) {
  Form form;
  const bool read = aoti_torch_get_dtype(tensor, &form.dtype) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_device_type(tensor, &form.device) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_device_index(tensor, &form.device_index) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_layout(tensor, &form.layout) == AOTI_TORCH_SUCCESS &&
                    form.layout == aoti_torch_layout_strided() &&
                    aoti_torch_get_dim(tensor, &form.dim) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_sizes(tensor, &form.sizes) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_strides(tensor, &form.strides) == AOTI_TORCH_SUCCESS;
  if (!read) return std::nullopt;
  // A handle is an at::Tensor, which is a pointer to a TensorImpl.
  const void* const object = *reinterpret_cast<void* const*>(tensor);
  form.requires_grad = TensorReaders()->requires_grad(object);
  std::memcpy(&form.keys, static_cast<const std::byte*>(object) + keys, sizeof form.keys);
  return form;
}

}  // namespace

bool CanReadVersions() { return TensorReaders().has_value(); }

std::optional<TensorState> StateOf(AtenTensorHandle tensor, bool counted) {
  void* data = nullptr;
  if (aoti_torch_get_data_ptr(tensor, &data) != AOTI_TORCH_SUCCESS) return std::nullopt;
  if (!counted) return TensorState{data, 0};
  // An inference tensor has no version: libtorch would throw, and what it throws must not come
  // here.
  if (TensorReaders()->is_inference(tensor)) return std::nullopt;
  return TensorState{data, TensorReaders()->version(tensor)};
}

bool CanReadForms() { return CanReadVersions() && TensorReaders()->requires_grad != nullptr; }

bool AppendForm(AtenTensorHandle tensor, ptrdiff_t keys, std::vector<int64_t>& numbers) {
  const std::optional<Form> form = FormOf(tensor, keys);
  if (!form) return false;
  numbers.insert(numbers.end(), {form->dtype, form->device, form->device_index, form->requires_grad,
                                 form->keys, form->dim});
  numbers.insert(numbers.end(), form->sizes, form->sizes + form->dim);
  numbers.insert(numbers.end(), form->strides, form->strides + form->dim);
  return true;
}

const int64_t* BehindForm(AtenTensorHandle tensor, ptrdiff_t keys, const int64_t* expected) {
  const std::optional<Form> form = FormOf(tensor, keys);
  if (!form || form->dtype != expected[0] || form->device != expected[1] ||
      form->device_index != expected[2] || form->requires_grad != (expected[3] != 0) ||
      form->keys != expected[4] || form->dim != expected[5]) {
    return nullptr;
  }
  expected += 6;
  if (!std::equal(form->sizes, form->sizes + form->dim, expected)) return nullptr;
  expected += form->dim;
  if (!std::equal(form->strides, form->strides + form->dim, expected)) return nullptr;
  return expected + form->dim;
}

}  // namespace torch_hybrid_backend
