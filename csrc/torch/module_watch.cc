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

// Keeps what is read alive while other Python code may run.
class References {
 public:
  References() = default;
  References(const References&) = delete;
  References& operator=(const References&) = delete;
  ~References() {
    for (PyObject* const object : objects_) Py_DecRef(object);
  }

  void Add(PyObject* object) {
    objects_.push_back(object);
    Py_IncRef(object);
  }

 private:
  std::vector<PyObject*> objects_;
};

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

// True if attributes may change in place: those that Dynamo keeps a set or dictionary in, as with
// mark_dynamic. The first of them changes the dictionary.
bool HaveMarks(PyObject* attributes) {
  PyObject* value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(attributes, &place, nullptr, &value) != 0) {
    if (PyAnySet_Check(value) != 0 || PyDict_Check(value) != 0) return true;
  }
  return false;
}

AtenTensorHandle HandleIn(PyObject* tensor, Py_ssize_t offset) {
  return reinterpret_cast<AtenTensorHandle>(reinterpret_cast<std::byte*>(tensor) + offset);
}

}  // namespace

uint64_t ModuleWatch::TagOf(PyObject* dictionary) const {
  uint64_t tag = 0;
  std::memcpy(&tag, reinterpret_cast<const std::byte*>(dictionary) + layout_.tag, sizeof tag);
  return tag;
}

bool ModuleWatch::IsAsItWas(const Entry& entry) const {
  if (entry.object != nullptr &&
      (Py_TYPE(entry.object) != entry.type || AttributesOf(entry.object) != entry.dictionary)) {
    return false;
  }
  return TagOf(entry.dictionary) == entry.tag;
}

bool ModuleWatch::AddTensor(const Entry& tensor, Kind kind) {
  if (tensor.type != layout_.types[0] && tensor.type != layout_.types[1]) return false;
  if (HaveMarks(tensor.dictionary) || !CanReadForms()) return false;
  if (!AppendForm(HandleIn(tensor.object, layout_.tensor), layout_.keys, forms_)) return false;
  tensors_.push_back(tensor);
  if (kind == Kind::kOwnTensor) own_tensors_.push_back(tensor.object);
  return true;
}

bool ModuleWatch::FormsAreThose() const {
  const int64_t* form = forms_.data();
  const size_t count = tensors_.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      Prefetch(tensors_[i + kAhead].object);
      Prefetch(tensors_[i + kAhead].dictionary);
    }
    if (!IsAsItWas(tensors_[i])) return false;
    form = BehindForm(HandleIn(tensors_[i].object, layout_.tensor), layout_.keys, form);
    if (form == nullptr) return false;
  }
  return true;
}

std::unique_ptr<const ModuleWatch> ModuleWatch::Take(PyObject* module,
                                                     const std::vector<Step>& steps,
                                                     const Layout& layout) {
  std::unique_ptr<ModuleWatch> watch(new ModuleWatch(layout));
  watch->entries_.reserve(steps.size());
  References references;
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
    references.Add(object);
    const bool is_plain = step.kind == Kind::kDictionary;
    PyObject* const dictionary = is_plain ? object : AttributesOf(object);
    // A subclass may keep what it holds elsewhere.
    if (dictionary == nullptr || PyDict_CheckExact(dictionary) == 0) return nullptr;
    references.Add(dictionary);
    const Entry entry{is_plain ? nullptr : object, is_plain ? nullptr : Py_TYPE(object), dictionary,
                      watch->TagOf(dictionary)};
    if (is_plain || step.kind == Kind::kModule) {
      watch->entries_.push_back(entry);
    } else if (!watch->AddTensor(entry, step.kind)) {
      return nullptr;
    }
  }
  return watch;
}

bool ModuleWatch::IsUnchanged(PyObject* module) const {
  if (entries_.empty() || entries_.front().object != module) return false;
  const size_t count = entries_.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const Entry& later = entries_[i + kAhead];
      Prefetch(later.dictionary);
      if (later.object != nullptr) {
        Prefetch(later.object);
        Prefetch(reinterpret_cast<const std::byte*>(later.object) - kBeforeObject);
      }
    }
    if (!IsAsItWas(entries_[i])) return false;
  }
  return FormsAreThose();
}

bool ModuleWatch::Holds(PyObject* object) const {
  return std::find(own_tensors_.begin(), own_tensors_.end(), object) != own_tensors_.end();
}

}  // namespace torch_hybrid_backend
