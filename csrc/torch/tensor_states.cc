#include "tensor_states.h"

#include <dlfcn.h>

#include <optional>

namespace torch_hybrid_backend {
namespace {

// Functions of libtorch's whose only argument is the tensor that a handle points at.
struct Readers {
  bool (*is_inference)(const AtenTensorOpaque*);  // at::native::is_inference
  int64_t (*version)(const AtenTensorOpaque*);    // at::TensorBase::_version
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
  dlclose(library);  // the process keeps it: this library is linked to it
  if (readers.is_inference == nullptr || readers.version == nullptr) return std::nullopt;
  return readers;
}

const std::optional<Readers>& TensorReaders() {
  static const std::optional<Readers> readers = FindReaders();
  return readers;
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

}  // namespace torch_hybrid_backend
