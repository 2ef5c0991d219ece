#include "module_guard.h"

#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "module_watch.h"

namespace torch_hybrid_backend {
namespace {

// After so many watches that served fewer calls than that, modules are left to Dynamo: those that
// change in every call, and layers that share a compilation.
constexpr int64_t kShortLived = 64;
constexpr int64_t kCalls = 16;

// A reference that is owned.
class Owned {
 public:
  Owned() = default;
  explicit Owned(PyObject* owned) : object_(owned) {}
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }

  static Owned Share(PyObject* object) { return Owned(Py_XNewRef(object)); }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

bool IsRightStep(const ModuleWatch::Step& step, int kind, size_t index, Py_ssize_t dictionaries) {
  const char* wrong = nullptr;
  if (kind < 0 || kind > static_cast<int>(ModuleWatch::Kind::kOwnTensor)) {
    wrong = "a step is of kind 0 to 3";
  } else if (index == 0 && kind != static_cast<int>(ModuleWatch::Kind::kModule)) {
    wrong = "the first step is the module";
  } else if (index != 0 && (step.parent < 0 || step.parent >= dictionaries)) {
    wrong = "a step begins at one before it";
  } else if (kind <= static_cast<int>(ModuleWatch::Kind::kModule) &&
             dictionaries != static_cast<Py_ssize_t>(index)) {
    wrong = "tensors come last";
  }
  if (wrong != nullptr) PyErr_SetString(PyExc_ValueError, wrong);
  return wrong == nullptr;
}

// The steps in a tuple, which must outlive them. No value with an exception set.
std::optional<std::vector<ModuleWatch::Step>> StepsOf(PyObject* items) {
  std::vector<ModuleWatch::Step> steps;
  Py_ssize_t dictionaries = 0;  // tensors have none that another step could begin at
  for (Py_ssize_t i = 0; i < PyTuple_Size(items); ++i) {
    ModuleWatch::Step step{};
    int kind = 0;
    if (PyArg_ParseTuple(PyTuple_GetItem(items, i), "nOni:step", &step.parent, &step.key,
                         &step.position, &kind) == 0 ||
        !IsRightStep(step, kind, static_cast<size_t>(i), dictionaries)) {
      return std::nullopt;
    }
    if (step.key == Py_None) step.key = nullptr;
    step.kind = static_cast<ModuleWatch::Kind>(kind);
    if (kind <= static_cast<int>(ModuleWatch::Kind::kModule)) ++dictionaries;
    steps.push_back(step);
  }
  return steps;
}

struct Root {
  PyObject* name;
  PyObject* space;  // null for local variables
  std::vector<ModuleWatch::Step> steps;
};

using KeySets = std::array<uint64_t, 2>;

// The state in which Dynamo's guards held.
struct Noted {
  std::vector<std::unique_ptr<const ModuleWatch>> watches;  // of the roots
  KeySets key_sets;
  mutable int64_t served = 0;
};

class ModuleGuard {
 public:
  // `arguments`: what the type is called with, which owns all that the guard knows.
  static std::unique_ptr<ModuleGuard> Make(PyObject* arguments);

  // 1 or 0 for yes or no; -1 with an exception set.
  int Check(PyObject* variables);

  void Forget();

  int64_t evaluations() const { return evaluations_; }
  bool is_left_to_dynamo() const { return short_lived_ > kShortLived; }
  PyObject* arguments() const { return arguments_.get(); }

 private:
  Owned ModuleOf(const Root& root, PyObject* variables) const;
  std::optional<KeySets> ReadKeySets() const;
  int IsUnchanged(const Noted& noted, PyObject* variables) const;
  int Evaluate(PyObject* variables);
  std::unique_ptr<Noted> Take(PyObject* variables) const;

  Owned arguments_;
  ModuleWatch::Layout layout_{};
  std::vector<Root> roots_;
  PyObject* others_ = nullptr;
  PyObject* key_sets_ = nullptr;
  PyObject* count_modes_ = nullptr;
  PyObject* guards_ = nullptr;
  std::shared_ptr<const Noted> noted_;
  int64_t forgotten_ = 0;  // how often
  int64_t short_lived_ = 0;
  int64_t evaluations_ = 0;
};

std::unique_ptr<ModuleGuard> ModuleGuard::Make(PyObject* arguments) {
  auto guard = std::make_unique<ModuleGuard>();
  guard->arguments_ = Owned::Share(arguments);
  PyObject* types = nullptr;
  PyObject* roots = nullptr;
  ModuleWatch::Layout& layout = guard->layout_;
  if (PyArg_ParseTuple(arguments, "nnnO!O!O!O!OO:ModuleGuard", &layout.tag, &layout.keys,
                       &layout.tensor, &PyTuple_Type, &types, &PyTuple_Type, &roots, &PyTuple_Type,
                       &guard->others_, &PyTuple_Type, &guard->key_sets_, &guard->count_modes_,
                       &guard->guards_) == 0 ||
      PyArg_ParseTuple(types, "O!O!:ModuleGuard", &PyType_Type, &layout.types[0], &PyType_Type,
                       &layout.types[1]) == 0) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(roots); ++i) {
    Root root{};
    PyObject* steps = nullptr;
    if (PyArg_ParseTuple(PyTuple_GetItem(roots, i), "UOO!:ModuleGuard", &root.name, &root.space,
                         &PyTuple_Type, &steps) == 0) {
      return nullptr;
    }
    if (root.space == Py_None) root.space = nullptr;
    auto read = StepsOf(steps);
    if (!read) return nullptr;
    root.steps = *std::move(read);
    guard->roots_.push_back(std::move(root));
  }
  if (PyTuple_Size(guard->key_sets_) != static_cast<Py_ssize_t>(KeySets{}.size())) {
    PyErr_SetString(PyExc_ValueError, "a thread has two sets of dispatch keys");
    return nullptr;
  }
  return guard;
}

// Null where there is none, or with an exception set.
Owned ModuleGuard::ModuleOf(const Root& root, PyObject* variables) const {
  return Owned::Share(
      PyDict_GetItemWithError(root.space == nullptr ? variables : root.space, root.name));
}

// No value with an exception set.
std::optional<KeySets> ModuleGuard::ReadKeySets() const {
  KeySets read{};
  for (size_t i = 0; i < read.size(); ++i) {
    const Owned keys(PyObject_CallNoArgs(PyTuple_GetItem(key_sets_, static_cast<Py_ssize_t>(i))));
    if (!keys) return std::nullopt;
    const Owned number(PyObject_CallMethod(keys.get(), "raw_repr", nullptr));
    if (!number) return std::nullopt;
    read[i] = PyLong_AsUnsignedLongLong(number.get());
    if (PyErr_Occurred() != nullptr) return std::nullopt;
  }
  return read;
}

// As Check.
int ModuleGuard::IsUnchanged(const Noted& noted, PyObject* variables) const {
  for (size_t i = 0; i < roots_.size(); ++i) {
    const Owned module = ModuleOf(roots_[i], variables);
    if (!module) return PyErr_Occurred() != nullptr ? -1 : 0;
    if (!noted.watches[i]->IsUnchanged(module.get())) return 0;
    for (Py_ssize_t k = 0; k < PyTuple_Size(others_); ++k) {
      PyObject* const other = PyDict_GetItemWithError(variables, PyTuple_GetItem(others_, k));
      if (other == nullptr) return PyErr_Occurred() != nullptr ? -1 : 0;
      if (noted.watches[i]->Holds(other)) return 0;
    }
  }
  const std::optional<KeySets> key_sets = ReadKeySets();
  if (!key_sets) return -1;
  return *key_sets == noted.key_sets ? 1 : 0;
}

int ModuleGuard::Check(PyObject* variables) {
  const std::shared_ptr<const Noted> noted = noted_;  // another thread may forget it
  if (noted != nullptr) {
    const int unchanged = IsUnchanged(*noted, variables);
    if (unchanged == 1) ++noted->served;
    if (unchanged != 0) return unchanged;
  }
  return Evaluate(variables);
}

void ModuleGuard::Forget() {
  ++forgotten_;
  const std::shared_ptr<const Noted> noted = std::move(noted_);
  noted_ = nullptr;
  if (noted != nullptr) short_lived_ = noted->served < kCalls ? short_lived_ + 1 : 0;
}

// Null where modules are not as the steps say, or with an exception set.
std::unique_ptr<Noted> ModuleGuard::Take(PyObject* variables) const {
  const std::optional<KeySets> key_sets = ReadKeySets();
  if (!key_sets) return nullptr;
  auto noted = std::make_unique<Noted>();
  noted->key_sets = *key_sets;
  for (const Root& root : roots_) {
    const Owned module = ModuleOf(root, variables);
    if (!module) return nullptr;
    auto watch = ModuleWatch::Take(module.get(), root.steps, layout_);
    if (watch == nullptr) return nullptr;
    noted->watches.push_back(std::move(watch));
  }
  return noted;
}

// Asks Dynamo's guards. Where they hold, modules are watched in the state that they have.
int ModuleGuard::Evaluate(PyObject* variables) {
  ++evaluations_;
  Forget();
  const int64_t forgotten = forgotten_;
  // Before the guards are asked: what another thread changes meanwhile is seen in the next call.
  std::unique_ptr<Noted> taken = is_left_to_dynamo() ? nullptr : Take(variables);
  if (PyErr_Occurred() != nullptr) return -1;
  if (taken == nullptr && !is_left_to_dynamo()) ++short_lived_;  // by a tensor's class, say
  const Owned modes(PyObject_CallNoArgs(count_modes_));
  if (!modes) return -1;
  const Owned answer(PyObject_CallMethod(guards_, "check", "O", variables));
  if (!answer) return -1;
  const int holds = PyObject_IsTrue(answer.get());
  // Two dispatch modes of one set of keys may yet differ in what Dynamo compiles under them. And
  // another thread's state must not be taken for the one in which these guards held.
  if (holds == 1 && taken != nullptr && PyObject_Not(modes.get()) == 1 && forgotten == forgotten_ &&
      IsUnchanged(*taken, variables) == 1) {
    noted_ = std::move(taken);
  }
  PyErr_Clear();  // of what was asked last
  return holds;
}

// What Python has: the guard behind an object's header.
struct Object {
  PyObject_HEAD;
  ModuleGuard* guard;
};

ModuleGuard& GuardOf(PyObject* self) { return *reinterpret_cast<Object*>(self)->guard; }

PyObject* New(PyTypeObject* type, PyObject* arguments, PyObject* named) {
  if (named != nullptr && PyDict_Size(named) != 0) {
    PyErr_SetString(PyExc_TypeError, "ModuleGuard takes no named arguments");
    return nullptr;
  }
  try {
    std::unique_ptr<ModuleGuard> guard = ModuleGuard::Make(arguments);
    if (guard == nullptr) return nullptr;
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject* const self = allocate(type, 0);
    if (self != nullptr) reinterpret_cast<Object*>(self)->guard = guard.release();
    return self;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

void Free(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->guard;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DecRef(reinterpret_cast<PyObject*>(type));
}

int Visit(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<PyObject*>(Py_TYPE(self)));
  if (reinterpret_cast<Object*>(self)->guard != nullptr) Py_VISIT(GuardOf(self).arguments());
  return 0;
}

PyObject* Check(PyObject* self, PyObject* variables) {
  if (PyDict_Check(variables) == 0) {
    PyErr_SetString(PyExc_TypeError, "check takes a dictionary of local variables");
    return nullptr;
  }
  try {
    const int holds = GuardOf(self).Check(variables);
    return holds < 0 ? nullptr : PyBool_FromLong(holds);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* Forget(PyObject* self, PyObject*) {
  GuardOf(self).Forget();
  return Py_NewRef(Py_None);
}

PyObject* Counts(PyObject* self, PyObject*) {
  const ModuleGuard& guard = GuardOf(self);
  return Py_BuildValue("(LO)", static_cast<long long>(guard.evaluations()),
                       guard.is_left_to_dynamo() ? Py_True : Py_False);
}

}  // namespace

PyObject* ModuleGuardType() {
  static PyMethodDef methods[] = {
      {"check", &Check, METH_O, "check(local variables) -> bool: whether guards on modules hold."},
      {"forget", &Forget, METH_NOARGS, "forget(): the next check asks Dynamo's guards."},
      {"counts", &Counts, METH_NOARGS,
       "counts() -> (how often Dynamo's guards were asked, whether they alone are from now on)."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(&New)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(&Free)},
                                {Py_tp_traverse, reinterpret_cast<void*>(&Visit)},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {"torch_hybrid_backend._runtime.ModuleGuard", sizeof(Object), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  return PyType_FromSpec(&spec);
}

}  // namespace torch_hybrid_backend
