// The Python module torch_hybrid_backend._runtime: what must not cost a dispatcher's call, in each
// call of a graph or for each tensor. It is built on Python's limited API, so one build serves
// every Python from 3.11 on.
//
// Where in a Python tensor its C++ tensor lies is for Python to find out and to tell (`learn`; see
// runtime/native/module.py): the only knowledge of its layout. What is no plain tensor or
// parameter, or no list, cannot be read here, and the caller goes another way.
//
// Failure: a Python exception for wrong arguments, as of any function, and RuntimeError for what
// the plan throws.
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "handle_tables.h"
#include "module_guard.h"
#include "processor.h"
#include "row_writes.h"
#include "tensor_states.h"
#include "tile_permission.h"

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

// The C++ tensor inside a list's item, as long as that lives; null where it is no plain tensor.
AtenTensorHandle TensorIn(PyObject* list, Py_ssize_t position) {
  PyObject* const item = PyList_GetItem(list, position);
  // Subclasses may override what reading them means; Parameter is known not to.
  if (Py_TYPE(item) != layout.tensor && Py_TYPE(item) != layout.parameter) return nullptr;
  return reinterpret_cast<AtenTensorHandle>(reinterpret_cast<std::byte*>(item) + layout.offset);
}

std::optional<TensorState> StateOfItem(PyObject* list, Py_ssize_t position, bool counted) {
  const AtenTensorHandle tensor = TensorIn(list, position);
  if (tensor == nullptr) return std::nullopt;
  return StateOf(tensor, counted);
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

// PyTorch's THPVariable_Wrap: a new reference to the Python object of a C++ tensor. Null where this
// torch has none of that name.
using Wrap = PyObject* (*)(const AtenTensorOpaque*);

Wrap FindWrap() {
  void* const library = dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return nullptr;
  void* const function = dlsym(library, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
  dlclose(library);  // PyTorch keeps it
  return reinterpret_cast<Wrap>(function);
}

Wrap Wrapper() {
  static const Wrap wrap = FindWrap();
  return wrap;
}

PyObject* AsList(const std::vector<Tensor>& tensors) {
  PyObject* const list = PyList_New(static_cast<Py_ssize_t>(tensors.size()));
  if (list == nullptr) return nullptr;
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* const tensor = Wrapper()(tensors[i].get());
    if (tensor == nullptr) {
      Py_DecRef(list);
      return nullptr;
    }
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), tensor);  // takes the reference
  }
  return list;
}

// The item as a plan takes it; no value for one that cannot be read here.
std::optional<Tensor> OwnedItem(PyObject* list, Py_ssize_t position) {
  const AtenTensorHandle tensor = TensorIn(list, position);
  if (tensor == nullptr) return std::nullopt;
  AtenTensorHandle owned = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &owned));
  return Tensor(owned);
}

// Lets other threads into the interpreter while it lives.
class InterpreterUnlocked {
 public:
  InterpreterUnlocked() : state_(PyEval_SaveThread()) {}
  InterpreterUnlocked(const InterpreterUnlocked&) = delete;
  InterpreterUnlocked& operator=(const InterpreterUnlocked&) = delete;
  ~InterpreterUnlocked() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// The references of a run's caller to its inputs, which it gives up.
class GivenUp {
 public:
  GivenUp(PyObject* list, PyObject* arguments, std::vector<Tensor>& inputs)
      : lists_{list, arguments}, inputs_(inputs) {}

  // Without the interpreter's lock.
  void operator()() const {
    inputs_.clear();
    const PyGILState_STATE state = PyGILState_Ensure();
    for (PyObject* const list : lists_) PyList_SetSlice(list, 0, PyList_Size(list), nullptr);
    PyGILState_Release(state);
  }

 private:
  PyObject* lists_[2];
  std::vector<Tensor>& inputs_;
};

PyObject* Run(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 && (count != 4 || !PyList_Check(arguments[3]))) {
    PyErr_SetString(PyExc_TypeError, "run takes a plan, a binding and one list or two");
    return nullptr;
  }
  const int64_t plan = PyLong_AsLongLong(arguments[0]);
  const int64_t binding = PyLong_AsLongLong(arguments[1]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  PyObject* const list = arguments[2];
  if (Wrapper() == nullptr || !PyList_Check(list)) return Py_NewRef(Py_NotImplemented);
  try {
    const Py_ssize_t size = PyList_Size(list);
    std::vector<Tensor> inputs;
    inputs.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      std::optional<Tensor> tensor = OwnedItem(list, i);
      if (!tensor) return Py_NewRef(Py_NotImplemented);
      inputs.push_back(*std::move(tensor));
    }
    const std::shared_ptr<Plan> running = Plans().Get(plan);
    const std::shared_ptr<const Binding> bound = Bindings().Get(binding);
    std::optional<RunResult> result;
    const std::function<void()> given_up =
        count == 4 ? GivenUp(list, arguments[3], inputs) : std::function<void()>();
    {
      const InterpreterUnlocked unlocked;
      result = running->Run(plan, *bound, inputs, given_up);
    }
    if (result->status == RunStatus::kDone) return AsList(result->outputs);
    return PyLong_FromLongLong(static_cast<int64_t>(result->status));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* WriteRowsOf(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "write_rows takes a list and a tuple");
    return nullptr;
  }
  PyObject* const list = arguments[0];
  PyObject* const numbers = arguments[1];
  if (layout.tensor == nullptr || !PyList_Check(list)) return Py_NewRef(Py_NotImplemented);
  const Py_ssize_t size = PyTuple_Check(numbers) ? PyTuple_Size(numbers) : -1;
  if (size < 0 || size % 4 != 0) {
    PyErr_SetString(PyExc_ValueError, "each write is four numbers of a tuple");
    return nullptr;
  }
  try {
    std::vector<RowWrite> writes;
    writes.reserve(static_cast<size_t>(size / 4));
    for (Py_ssize_t i = 0; i < size; i += 4) {
      std::optional<Tensor> tensors[3];  // target, index, source
      for (size_t k = 0; k < 3; ++k) {
        const Py_ssize_t position = PyLong_AsSsize_t(
            PyTuple_GetItem(numbers, i + (k == 0 ? 0 : 1 + static_cast<Py_ssize_t>(k))));
        if (position == -1 && PyErr_Occurred() != nullptr) return nullptr;
        if (position < 0 || position >= PyList_Size(list)) {
          PyErr_SetString(PyExc_IndexError, "the list has no such position");
          return nullptr;
        }
        tensors[k] = OwnedItem(list, position);
        if (!tensors[k]) return Py_NewRef(Py_NotImplemented);
      }
      const int64_t dim = PyLong_AsLongLong(PyTuple_GetItem(numbers, i + 1));
      if (dim == -1 && PyErr_Occurred() != nullptr) return nullptr;
      writes.push_back({*tensors[0], dim, *tensors[1], *tensors[2]});
    }
    if (!WriteRows(writes)) return Py_NewRef(Py_NotImplemented);
    return Py_NewRef(Py_None);
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// An exception would lose its type on its way through the dispatcher. It may come before the first
// line of the function, from a signal's handler, so that nothing written in Python can catch it.
PyObject* RunSegment(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 7) {
    PyErr_SetString(PyExc_TypeError, "run_segment takes a function, a keeper, a list and 4 more");
    return nullptr;
  }
  PyObject* const result = PyObject_CallFunctionObjArgs(arguments[0], arguments[3], arguments[4],
                                                        arguments[5], arguments[6], nullptr);
  if (result != nullptr) return result;
  PyObject* type = nullptr;
  PyObject* error = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  const int kept = PyObject_SetAttrString(arguments[1], "error", error);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  const Py_ssize_t outputs = PyLong_AsSsize_t(arguments[5]);
  if (kept != 0 || PyErr_Occurred() != nullptr) return nullptr;
  return PySequence_Repeat(arguments[2], outputs + 1);
}

PyObject* MayUseTilesNow(PyObject*, PyObject*) { return PyBool_FromLong(MayUseTiles()); }

PyObject* Features(PyObject*, PyObject*) {
  PyObject* const list = PyList_New(0);
  if (list == nullptr) return nullptr;
  for (const std::string& feature : ThisProcessor().features) {
    PyObject* const name = PyUnicode_FromString(feature.c_str());
    const int status = name == nullptr ? -1 : PyList_Append(list, name);
    Py_XDECREF(name);
    if (status != 0) {
      Py_DECREF(list);
      return nullptr;
    }
  }
  return list;
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
      {"run", AsMethod(&Run), METH_FASTCALL,
       "run(plan, binding, inputs[, arguments]) -> list of outputs, the status of a run that was "
       "not done, or NotImplemented where an input cannot be read. Where `arguments` are given, "
       "both lists are emptied once the run has taken its inputs."},
      {"write_rows", AsMethod(&WriteRowsOf), METH_FASTCALL,
       "write_rows(tensors, numbers) -> None, or NotImplemented where nothing was written, as a "
       "tensor cannot be read; `numbers`: target, dimension, index and source of each write "
       "(row_writes.h)."},
      {"run_segment", AsMethod(&RunSegment), METH_FASTCALL,
       "run_segment(function, keeper, stand_in, plan, segment, outputs, inputs) -> list of "
       "tensors: "
       "what the function makes of the last four. Where it raises: `keeper.error` is the "
       "exception, "
       "and the list has one tensor more than `outputs`, all of them that in the list stand_in."},
      {"may_use_tiles", &MayUseTilesNow, METH_NOARGS,
       "may_use_tiles() -> bool: asks the system to let this process use AMX's tile registers."},
      {"features", &Features, METH_NOARGS,
       "features() -> list of str: what this processor can do, by Linux's names (processor.h)."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_runtime", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return &definition;
}

}  // namespace
}  // namespace torch_hybrid_backend

PyMODINIT_FUNC PyInit__runtime() {
  PyObject* const module = PyModule_Create(torch_hybrid_backend::Definition());
  if (module == nullptr) return nullptr;
  PyObject* const guard = torch_hybrid_backend::ModuleGuardType();
  if (guard == nullptr || PyModule_AddObjectRef(module, "ModuleGuard", guard) != 0) {
    Py_DecRef(module);
    Py_XDECREF(guard);
    return nullptr;
  }
  Py_DecRef(guard);
  return module;
}
