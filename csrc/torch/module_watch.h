// ModuleWatch: whether a module, its attributes, its submodules and theirs are as they were.
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
// Everything here runs with the interpreter's lock held, and without running Python code.
#ifndef TORCH_HYBRID_BACKEND_MODULE_WATCH_H_
#define TORCH_HYBRID_BACKEND_MODULE_WATCH_H_

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torch_hybrid_backend {

class ModuleWatch {
 public:
  enum class Kind : int { kDictionary = 0, kModule = 1, kTensor = 2 };

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
                                                 Py_ssize_t tag_offset);

  // True if `module` is the one that was taken, and nothing on the way has changed.
  bool IsUnchanged(PyObject* module) const;

  // True if `object` is one of the tensors, as long as nothing has changed.
  bool Holds(PyObject* object) const;

 private:
  struct Entry {
    PyObject* module;    // null for a plain dictionary
    PyTypeObject* type;  // of the module
    PyObject* dictionary;
    uint64_t tag;
  };

  explicit ModuleWatch(Py_ssize_t tag_offset) : tag_offset_(tag_offset) {}

  uint64_t TagOf(PyObject* dictionary) const;

  Py_ssize_t tag_offset_;  // bytes from a dictionary's start
  std::vector<Entry> entries_;  // of the steps but tensors, which come last
  std::vector<PyObject*> tensors_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_MODULE_WATCH_H_
