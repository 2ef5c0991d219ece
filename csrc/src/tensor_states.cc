#include "tensor_states.h"

#include <dlfcn.h>

#include <exception>

namespace torch_hybrid_backend {
namespace {

// at::TensorBase::_version, whose only implicit argument is the tensor that a handle points at.
using ReadVersion = int64_t (*)(const AtenTensorOpaque*);

ReadVersion FindVersionReader() {
  // In the very library that the functions called here are in: it is not among the global symbols.
  Dl_info found;
  if (dladdr(reinterpret_cast<void*>(&aoti_torch_get_data_ptr), &found) == 0) return nullptr;
  void* const library = dlopen(found.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return nullptr;
  void* const function = dlsym(library, "_ZNK2at10TensorBase8_versionEv");
  dlclose(library);  // the process keeps it: this library is linked to it
  return reinterpret_cast<ReadVersion>(function);
}

ReadVersion VersionReader() {
  static const ReadVersion reader = FindVersionReader();
  return reader;
}

}  // namespace

bool CanReadVersions() { return VersionReader() != nullptr; }

std::optional<TensorState> StateOf(AtenTensorHandle tensor, bool counted) {
  void* data = nullptr;
  if (aoti_torch_get_data_ptr(tensor, &data) != AOTI_TORCH_SUCCESS) return std::nullopt;
  if (!counted) return TensorState{data, 0};
  try {
    return TensorState{data, VersionReader()(tensor)};
  } catch (const std::exception&) {
    return std::nullopt;  // an inference tensor
  }
}

}  // namespace torch_hybrid_backend
