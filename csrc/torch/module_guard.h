// ModuleGuard: a guard of a compiled frame that stands for Dynamo's guards on modules: it holds
// while watches (module_watch.h) see no change, and asks Dynamo's guards where one does.
//
// Python has it as a type (`ModuleGuardType`), whose objects own what they are made of, and take
// part in the collection of garbage.
//
// Failure: a Python exception for arguments that are not as `ModuleGuardType` says.
//
// Everything here runs with the interpreter's lock held. Dynamo swallows what a guard raises, and
// holds a lock meanwhile. So no bytecode runs here, in which a signal's handler or another thread
// could, but what Dynamo's own guards run.
#ifndef TORCH_HYBRID_BACKEND_MODULE_GUARD_H_
#define TORCH_HYBRID_BACKEND_MODULE_GUARD_H_

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace torch_hybrid_backend {

// A new reference to the type; null with an exception set. ModuleGuard(tag, keys, tensor, types,
// roots, others, key_sets, count_modes, guards):
//   tag, keys, tensor, types   as in ModuleWatch::Layout (module_watch.h); types is a tuple of two.
//   roots         ((name, namespace or None for local variables, steps), ...): the modules.
//                 A step: (parent, key or None, position, kind), as in ModuleWatch::Step.
//   others        (name, ...): local variables that must be none of the modules' own tensors.
//   key_sets      (function, function): each returns a set of dispatch keys of this thread.
//   count_modes   a function that returns how many dispatch modes this thread is in.
//   guards        Dynamo's of the frame, all of them.
// Its methods: check(local variables) -> bool, forget() and counts() -> (how often Dynamo's guards
// were asked, whether they alone are from now on).
PyObject* ModuleGuardType();

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_MODULE_GUARD_H_
