#include "module_watch.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "tensor_states.h"

namespace torch_hybrid_backend {
namespace {

// Entries lie far apart, and a call of the model has put other data into the caches.
constexpr size_t kAhead = 12;
constexpr size_t kBeforeObject =
    3 * sizeof(void*);  // where Python 3.11 keeps what finds a dictionary

// Reads nothing, so that the address may be of memory that is gone.
void Prefetch(const void* address) { __builtin_prefetch(address); }

// The dictionary of an object's attributes, which the object holds. Null where it has none.
PyObject* AttributesOf(PyObject* object) {
  PyObject* const dictionary = PyObject_GenericGetDict(object, nullptr);
  if (dictionary == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  Py_DecRef(dictionary);
  return dictionary;
}

PyObject* ValueAt(PyObject* dictionary, Py_ssize_t position) {
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  for (Py_ssize_t i = 0; i <= position; ++i) {
    if (PyDict_Next(dictionary, &place, nullptr, &value) == 0) return nullptr;
  }
  return value;
}

}  // namespace

uint64_t ModuleWatch::TagOf(PyObject* dictionary) const {
  uint64_t tag = 0;
  std::memcpy(&tag, reinterpret_cast<const std::byte*>(dictionary) + layout_.tag, sizeof tag);
  return tag;
}

bool ModuleWatch::AddTensor(PyObject* object, Kind kind) {
  PyTypeObject* const type = Py_TYPE(object);
  if (type != layout_.types[0] && type != layout_.types[1]) return false;
  const auto handle =
      reinterpret_cast<AtenTensorHandle>(reinterpret_cast<std::byte*>(object) + layout_.tensor);
  if (!CanReadForms() || !AppendForm(handle, forms_)) return false;
  tensors_.push_back({object, type});
  if (kind == Kind::kOwnTensor) own_tensors_.push_back(object);
  return true;
}

bool ModuleWatch::FormsAreThose() const {
  const int64_t* form = forms_.data();
  const size_t count = tensors_.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) Prefetch(tensors_[i + kAhead].object);
    const auto [object, type] = tensors_[i];
    if (Py_TYPE(object) != type) return false;
    form = BehindForm(
        reinterpret_cast<AtenTensorHandle>(reinterpret_cast<std::byte*>(object) + layout_.tensor),
        form);
    if (form == nullptr) return false;
  }
  return true;
}

std::unique_ptr<const ModuleWatch> ModuleWatch::Take(PyObject* module,
                                                     const std::vector<Step>& steps,
                                                     const Layout& layout) {
  std::unique_ptr<ModuleWatch> watch(new ModuleWatch(layout));
  watch->entries_.reserve(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    PyObject* object = module;
    if (i != 0) {
      PyObject* const parent = watch->entries_[static_cast<size_t>(step.parent)].dictionary;
      object = step.key == nullptr ? ValueAt(parent, step.position)
                                   : PyDict_GetItemWithError(parent, step.key);
      if (object == nullptr) {
        PyErr_Clear();
        return nullptr;
      }
    }
    if (step.kind == Kind::kTensor || step.kind == Kind::kOwnTensor) {
      if (!watch->AddTensor(object, step.kind)) return nullptr;
      continue;
    }
    const bool is_module = step.kind == Kind::kModule;
    PyObject* const dictionary = is_module ? AttributesOf(object) : object;
    // A subclass may keep what it holds elsewhere.
    if (dictionary == nullptr || PyDict_CheckExact(dictionary) == 0) return nullptr;
    watch->entries_.push_back({is_module ? object : nullptr, is_module ? Py_TYPE(object) : nullptr,
                               dictionary, watch->TagOf(dictionary)});
  }
  return watch;
}

bool ModuleWatch::IsUnchanged(PyObject* module) const {
  if (entries_.empty() || entries_.front().module != module) return false;
  const size_t count = entries_.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const Entry& later = entries_[i + kAhead];
      Prefetch(later.dictionary);
      if (later.module != nullptr) {
        Prefetch(later.module);
        Prefetch(reinterpret_cast<const std::byte*>(later.module) - kBeforeObject);
      }
    }
    const Entry& entry = entries_[i];
    if (entry.module != nullptr &&
        (Py_TYPE(entry.module) != entry.type || AttributesOf(entry.module) != entry.dictionary)) {
      return false;
    }
    if (TagOf(entry.dictionary) != entry.tag) return false;
  }
  if (!FormsAreThose()) return false;
  ++times_unchanged_;
  return true;
}

bool ModuleWatch::Holds(PyObject* object) const {
  return std::find(own_tensors_.begin(), own_tensors_.end(), object) != own_tensors_.end();
}

}  // namespace torch_hybrid_backend
