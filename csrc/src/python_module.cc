// The Python module torch_hybrid_backend._runtime: what must not cost a dispatcher's call for each
// tensor. It is built on Python's limited API, so one build serves every Python from 3.11 on.
//
// Where in a Python tensor its C++ tensor lies is for Python to find out and to tell (`learn`; see
// runtime/tensor_states.py): the only knowledge of its layout. All else that is no plain tensor or
// parameter, or no list, is "cannot tell", and the caller looks in Python.
//
// Failure: a Python exception for wrong arguments, as of any function.
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "tensor_states.h"

namespace torch_hybrid_backend {
namespace {

constexpr const char* kSnapshot = "torch_hybrid_backend.snapshot";

// Set once, by Learn; read with the interpreter's lock held, as it is set.
struct {
  Py_ssize_t offset = 0;
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
} layout;

// The states of some of a list's tensors.
struct Snapshot {
  struct Entry {
    Py_ssize_t position;
    bool counted;
    TensorState state;
  };
  std::vector<Entry> entries;
  Py_ssize_t shortest = 0;  // list that has all positions
};

std::optional<TensorState> StateOfItem(PyObject* list, Py_ssize_t position, bool counted) {
  PyObject* const item = PyList_GetItem(list, position);
  // Subclasses may override what reading them means; Parameter is known not to.
  if (Py_TYPE(item) != layout.tensor && Py_TYPE(item) != layout.parameter) return std::nullopt;
  return StateOf(
      reinterpret_cast<AtenTensorHandle>(reinterpret_cast<std::byte*>(item) + layout.offset),
      counted);
}

PyObject* Learn(PyObject*, PyObject* arguments) {
  Py_ssize_t offset = 0;
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  if (PyArg_ParseTuple(arguments, "nO!O!:learn", &offset, &PyType_Type, &tensor, &PyType_Type,
                       &parameter) == 0) {
    return nullptr;
  }
  Py_IncRef(tensor);
  Py_IncRef(parameter);
  layout = {offset, reinterpret_cast<PyTypeObject*>(tensor),
            reinterpret_cast<PyTypeObject*>(parameter)};
  return PyBool_FromLong(CanReadVersions());
}

void FreeSnapshot(PyObject* capsule) {
  delete static_cast<Snapshot*>(PyCapsule_GetPointer(capsule, kSnapshot));
}

PyObject* TakeSnapshot(PyObject*, PyObject* arguments) {
  PyObject* list = nullptr;
  PyObject* positions = nullptr;
  const char* counted = nullptr;
  Py_ssize_t count = 0;
  if (PyArg_ParseTuple(arguments, "OO!y#:snapshot", &list, &PyTuple_Type, &positions, &counted,
                       &count) == 0) {
    return nullptr;
  }
  if (PyTuple_Size(positions) != count) {
    PyErr_SetString(PyExc_ValueError, "each position needs a byte that says whether it is counted");
    return nullptr;
  }
  if (layout.tensor == nullptr || !PyList_Check(list)) return Py_NewRef(Py_None);
  try {
    auto snapshot = std::make_unique<Snapshot>();
    snapshot->entries.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GetItem(positions, i));
      if (position == -1 && PyErr_Occurred() != nullptr) return nullptr;
      if (position < 0 || position >= PyList_Size(list)) {
        PyErr_SetString(PyExc_IndexError, "the list has no such position");
        return nullptr;
      }
      const auto state = StateOfItem(list, position, counted[i] != 0);
      if (!state) return Py_NewRef(Py_None);
      snapshot->entries.push_back({position, counted[i] != 0, *state});
      snapshot->shortest = std::max(snapshot->shortest, position + 1);
    }
    PyObject* const capsule = PyCapsule_New(snapshot.get(), kSnapshot, &FreeSnapshot);
    if (capsule != nullptr) snapshot.release();
    return capsule;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* Unchanged(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "unchanged takes a snapshot and a list");
    return nullptr;
  }
  const auto* const snapshot =
      static_cast<const Snapshot*>(PyCapsule_GetPointer(arguments[0], kSnapshot));
  if (snapshot == nullptr) return nullptr;
  PyObject* const list = arguments[1];
  if (!PyList_Check(list) || PyList_Size(list) < snapshot->shortest) Py_RETURN_FALSE;
  for (const Snapshot::Entry& entry : snapshot->entries) {
    if (StateOfItem(list, entry.position, entry.counted) != entry.state) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// Python's table of methods has one type for all ways of being called.
PyCFunction AsMethod(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyModuleDef* Definition() {
  static PyMethodDef methods[] = {
      {"learn", &Learn, METH_VARARGS,
       "learn(offset, tensor, parameter) -> bool: where the C++ tensor lies in objects of these "
       "two "
       "types; whether version counters can be read."},
      {"snapshot", &TakeSnapshot, METH_VARARGS,
       "snapshot(tensors, positions, counted) -> object or None where a state cannot be read."},
      {"unchanged", AsMethod(&Unchanged), METH_FASTCALL,
       "unchanged(snapshot, tensors) -> bool: whether each has the memory and version it had."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_runtime", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return &definition;
}

}  // namespace
}  // namespace torch_hybrid_backend

PyMODINIT_FUNC PyInit__runtime() { return PyModule_Create(torch_hybrid_backend::Definition()); }
