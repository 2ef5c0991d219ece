// ModuleWatch: whether a module, its attributes, its submodules and theirs are as they were, and of
// its tensors the forms (tensor_states.h) and attributes, which change without a dictionary of the
// module's.
//
// Python gives every dictionary a number that no other has, and a new one with each change of what
// it holds (its version tag; PEP 509). A module's attributes, parameters, buffers and submodules
// are values of dictionaries. So equal numbers on the way from a module down mean equal objects.
//
// Memory: none of Python's objects is owned. Each is reached through one that was compared before
// it, and which therefore still holds it: nothing that may be gone is read.
//
// Failure: no value where the objects are not as the steps say; nothing is thrown but bad_alloc.
//
// Everything here runs with the interpreter's lock held. IsUnchanged runs no Python code.
#ifndef TORCH_HYBRID_BACKEND_MODULE_WATCH_H_
#define TORCH_HYBRID_BACKEND_MODULE_WATCH_H_

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_hybrid_backend {

class ModuleWatch {
 public:
  // A kOwnTensor must be no tensor of others (`Holds`).
  enum class Kind : int { kDictionary = 0, kModule = 1, kTensor = 2, kOwnTensor = 3 };

  // Where the number lies in a dictionary, dispatch keys in a C++ tensor, and the pointer to that
  // in objects of these two types.
  struct Layout {
    Py_ssize_t tag;
    Py_ssize_t keys;
    Py_ssize_t tensor;
    PyTypeObject* types[2];
  };

  // A dictionary on the way, a module, whose attributes are one, or a tensor. `parent`: the step
  // whose dictionary holds it. `key`: under which; null where `position` says which of its values,
  // in their order.
  struct Step {
    Py_ssize_t parent;
    PyObject* key;
    Py_ssize_t position;
    Kind kind;
  };

  // Takes the numbers as they are. Step 0 is the module itself; tensors come last.
  static std::unique_ptr<const ModuleWatch> Take(PyObject* module, const std::vector<Step>& steps,
                                                 const Layout& layout);

  // True if `module` is the one that was taken, and nothing on the way has changed.
  bool IsUnchanged(PyObject* module) const;

  // True if `object` is one of the own tensors, as long as nothing has changed.
  bool Holds(PyObject* object) const;

 private:
  // A dictionary; the module or tensor whose attributes it has is null for a plain one.
  struct Entry {
    PyObject* object;
    PyTypeObject* type;
    PyObject* dictionary;
    uint64_t tag;
  };

  explicit ModuleWatch(const Layout& layout) : layout_(layout) {}

  uint64_t TagOf(PyObject* dictionary) const;
  bool IsAsItWas(const Entry& entry) const;
  bool AddTensor(const Entry& tensor, Kind kind);
  bool FormsAreThose() const;

  Layout layout_;
  std::vector<Entry> entries_;  // of the steps but tensors, which come last
  std::vector<Entry> tensors_;
  std::vector<int64_t> forms_;  // of all tensors, one behind the other
  std::vector<PyObject*> own_tensors_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_MODULE_WATCH_H_
