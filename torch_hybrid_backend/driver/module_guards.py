"""Guards on modules that have not changed: one comparison of numbers in place of Dynamo's walk through the modules.

Leaves: `shorten_module_guards()`, after which frames compiled for a package are guarded so.

In every call Dynamo looks at each module, at each attribute that the trace read, and at each parameter: 5,500 guards for MobileNetV2, in memory
that the kernels of the last call drove out of the caches. All of these are values of dictionaries, and a watch of a module tells whether any of
its dictionaries has changed (`runtime/native/module_watch.py`). Where none has since Dynamo's guards held, they hold again. Where one has, they
decide, and the watch is renewed. No guard is left out: what is no value of a plain dictionary below a module keeps its own.

`_Walk` finds the guards that follow from dictionaries, and the way to these. `ModuleGuards` decides in each call. PyTorch has the same idea as
`use_recursive_dict_tags_for_guards`, off by default since 2.13, as it reads dictionaries that may be gone (pytorch/pytorch#181873, #188101).
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.runtime.native.module_watch import DICTIONARY, MODULE, TENSOR, Step, Watches, watches
from torch_hybrid_backend.torch_private import after_guards_are_built, is_compiling_for

log = logging.getLogger(__name__)

# Guards on modules, on dictionaries and on constants that hold as long as the dictionaries on the way to them are unchanged.
_OF_MODULES = frozenset({"TYPE_MATCH", "ID_MATCH"})
_OF_DICTIONARIES = _OF_MODULES | {"DICT_CONTAINS", "DICT_LENGTH", "LENGTH_CHECK", "DICT_VERSION"}
_OF_CONSTANTS = _OF_MODULES | {
    *("EQUALS_MATCH", "NONE_MATCH", "NOT_NONE", "TRUE_MATCH", "FALSE_MATCH", "LENGTH_CHECK"),
    # Dynamo itself takes a tensor for unchanged where the dictionary that holds it is (`skip_tensor_guards_with_matching_dict_tags`). The plan
    # reads data pointers and versions of parameters in each call.
    *("TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD"),
}
_IS_NO_OTHER = "NO_TENSOR_ALIASING"  # than any tensor with this guard
# Watches are renewed so often, and once in so many calls besides. Modules that change in every call are left to Dynamo.
_RENEWALS, _CALLS_PER_RENEWAL = 64, 16


@dataclass(slots=True)
class _Walk:
    """The dictionaries below a module that guards look into.

    follow, stay: sources of the guards that follow from these, and of others.
    tensors: those that must be no other tensor that is guarded so; None where such guards stay.
    """

    tensors: list[Step] | None
    steps: list[Step] = field(default_factory=list)
    follow: set[str] = field(default_factory=set)
    stay: set[str] = field(default_factory=set)

    def module(self, node: Any, module: nn.Module, parent: int = 0, key: str | None = None, position: int = 0) -> bool:
        """True if all guards on the module and below it follow. `node`: the module's, in Dynamo's tree of guards."""
        if type(module) is not node.get_type_of_guarded_value():
            return self._noted(node, False)
        here = self._step(parent, key, position, MODULE)
        follow = _has_only(node, _OF_MODULES)
        for accessor, child in _children(node):
            if _reads_attributes(accessor) and type(vars(module)) is dict:
                follow &= self._dictionary(child, vars(module), here)
            else:
                follow = self._noted(child, False)
        return self._noted(node, follow)

    def _dictionary(self, node: Any, held: dict[Any, Any], here: int) -> bool:
        follow = _has_only(node, _OF_DICTIONARIES)
        if hasattr(node, "get_key_value_managers"):  # guarded in the order of its items
            items = list(held.items())
            for position, (of_key, of_value) in node.get_key_value_managers().items():
                key, value = items[position]
                if of_key is not None:
                    follow &= self._noted(of_key, type(key) is str and _is_constant(of_key))
                if of_value is not None:
                    follow &= self._value(of_value, value, here, None, position)
            return self._noted(node, follow)
        for accessor, child in _children(node):
            name = _key_of(accessor)
            if name is not None and name in held:
                follow &= self._value(child, held[name], here, name, 0)
            else:
                follow = self._noted(child, False)
        return self._noted(node, follow)

    def _value(self, node: Any, value: object, parent: int, key: str | None, position: int) -> bool:
        if isinstance(value, nn.Module):
            return self.module(node, value, parent, key, position)
        if type(value) is dict:
            return self._dictionary(node, value, self._step(parent, key, position, DICTIONARY))
        if self.tensors is not None and _is_no_other(node):
            self.tensors.append((parent, key, position, TENSOR))
            return self._noted(node, _is_constant(node, {*_OF_CONSTANTS, _IS_NO_OTHER}))
        return self._noted(node, _is_constant(node))

    def _step(self, parent: int, key: str | None, position: int, kind: int) -> int:
        self.steps.append((parent, key, position, kind))
        return len(self.steps) - 1

    def _noted(self, node: Any, follows: bool) -> bool:
        (self.follow if follows else self.stay).add(node.get_source())
        return follows


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    return zip(node.get_accessors(), node.get_child_managers(), strict=True)


def _has_only(node: Any, guards: Set[str]) -> bool:
    return all(type(guard).__name__ in guards for guard in node.get_leaf_guards())


def _is_no_other(node: Any) -> bool:
    return any(type(guard).__name__ == _IS_NO_OTHER for guard in node.get_leaf_guards())


def _is_constant(node: Any, guards: Set[str] = _OF_CONSTANTS) -> bool:
    """True for a tensor, a number, a string or a tuple of these, with none but these guards."""
    kinds = {type(guard).__name__ for guard in node.get_leaf_guards()}
    return (
        node.is_guarded_value_immutable()
        and not node.has_object_aliasing_guard()
        and kinds <= guards
        # In another module that the compilation serves, something else of that length may change.
        and ("LENGTH_CHECK" not in kinds or "TYPE_MATCH" in kinds)
        and all(
            type(accessor).__name__ == "TupleGetItemGuardAccessor" and _is_constant(child)
            for accessor, child in _children(node)
        )
    )


def _reads_attributes(accessor: Any) -> bool:
    """True for the accessor of a module's `__dict__`: Dynamo's own way to attributes, or a model's."""
    kind = type(accessor).__name__
    return kind == "GetGenericDictGuardAccessor" or (
        kind == "GetAttrGuardAccessor" and accessor.get_attr_name() == "__dict__"
    )


def _key_of(accessor: Any) -> str | None:
    """The string that is looked up in a dictionary; None for another accessor or key."""
    found = re.fullmatch(r"DictGetItemGuardAccessor\((.*)\)", accessor.repr(), re.DOTALL)
    try:
        key = found and ast.literal_eval(found[1])
    except (ValueError, SyntaxError):
        return None
    return key if type(key) is str else None


def _local_of(accessor: Any) -> str | None:
    """The name of the local variable that is looked up; None for another accessor."""
    found = re.fullmatch(r"FrameLocalsGuardAccessor\(key='(\w+)', framelocals_idx=\d+\)", accessor.repr())
    return found and found[1]


@dataclass(slots=True)
class _Root:
    """A module that a frame finds under a name, among its local variables or in `namespace`.

    watches: of the modules that were found there, by id; one compilation may serve many.
    """

    name: str
    namespace: Mapping[str, Any] | None
    steps: tuple[Step, ...]
    watches: dict[int, object] = field(default_factory=dict)

    def module(self, local_variables: Mapping[str, Any]) -> object:
        return (local_variables if self.namespace is None else self.namespace).get(self.name)


class ModuleGuards:
    """A guard that stands for those on modules.

    guards: Dynamo's of the frame, all of them. roots: the modules. others: local variables that must not be one of the modules' tensors.
    """

    def __init__(self, guards: Any, roots: list[_Root], others: list[str], watching: Watches) -> None:
        self._guards = guards
        self._roots = roots
        self._others = others
        self._take, self._unchanged, self._holds = watching.take, watching.unchanged, watching.holds
        self._renewals = self._calls = 0

    def __call__(self, local_variables: Mapping[str, Any]) -> bool:
        """True if the guards on modules hold."""
        self._calls += 1
        for root in self._roots:
            module = root.module(local_variables)
            watch = root.watches.get(id(module))
            if watch is None or not self._unchanged(watch, module):
                return self.evaluated(local_variables)
            for name in self._others:
                if self._holds(watch, local_variables[name]):
                    return self.evaluated(local_variables)
        return True

    def evaluated(self, local_variables: Mapping[str, Any]) -> bool:
        """True if Dynamo's guards hold. The modules are then watched in the state that they have."""
        taken = []
        if self._renewals <= _RENEWALS + self._calls // _CALLS_PER_RENEWAL:
            self._renewals += 1
            for root in self._roots:
                module = root.module(local_variables)
                # Before the guards are evaluated: what another thread changes meanwhile is seen in the next call.
                taken.append((root.watches, id(module), self._take(module, root.steps)))
        if not self._guards.check(local_variables):
            return False
        for known, identity, watch in taken:
            if len(known) >= _RENEWALS:
                known.clear()
            if watch is not None:
                known[identity] = watch
        return True


def _variables(
    guards: Any, local_variables: Mapping[str, Any], namespace: Mapping[str, Any]
) -> Iterator[tuple[str | None, Mapping[str, Any] | None, Any, Any]]:
    """Yield the variables of a frame that are guarded: (name, the namespace of a global one, value, node in the tree of guards)."""
    for accessor, node in _children(guards):
        if type(accessor).__name__ == "GlobalsGuardAccessor":
            for inner, global_node in _children(node):
                name = _key_of(inner)
                yield name, namespace, namespace.get(name or ""), global_node
        else:
            name = _local_of(accessor)
            yield name, None, local_variables.get(name or ""), node


def _others(node: Any, follow: Set[str]) -> Iterator[str | None]:
    """Yield names of local variables that must be no other tensor; None for what is no local variable. `follow`: what is not asked any more."""
    for accessor, child in _every_child(node):
        if child.get_source() not in follow:
            if _is_no_other(child):
                yield None if accessor is None else _local_of(accessor)
            yield from _others(child, follow)


def _every_child(node: Any) -> Iterator[tuple[Any, Any]]:
    if hasattr(node, "get_key_value_managers"):
        pairs = node.get_key_value_managers().values()
        return ((None, child) for pair in pairs for child in pair if child is not None)
    return _children(node)


def _found(
    built: Any, local_variables: Mapping[str, Any], namespace: Mapping[str, Any], tensors_too: bool
) -> tuple[list[_Root], list[str | None], set[str]]:
    """(modules, names of tensors that must be none of the modules' own, sources of guards that follow).

    tensors_too: the guards that tensors are no others may follow.
    """
    roots: list[_Root] = []
    follow: set[str] = set()
    stay: set[str] = set()
    holding = 0
    for name, of_globals, value, node in _variables(built.root, local_variables, namespace):
        if name is not None and isinstance(value, nn.Module):
            walk = _Walk([] if tensors_too else None)
            walk.module(node, value)
            if walk.follow - walk.stay:
                roots.append(_Root(name, of_globals, (*walk.steps, *(walk.tensors or ()))))
                holding += bool(walk.tensors)
            follow |= walk.follow
            stay |= walk.stay
    follow -= stay
    # Tensors of two modules were compared with each other, but not those of every two that the frame may meet.
    others: list[str | None] = [None] if holding > 1 else []
    if holding == 1:
        others = list(_others(built.root, follow))
    return roots, others, follow


def _shorten(built: Any, local_variables: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
    """Put a `ModuleGuards` in place of the guards that it stands for."""
    watching = watches()
    if watching is None:
        return
    roots, others, follow = _found(built, local_variables, namespace, tensors_too=True)
    if None in others:
        roots, others, follow = _found(built, local_variables, namespace, tensors_too=False)
    module_guards = ModuleGuards(built.root, roots, [name for name in others if name is not None], watching)
    if not roots or not module_guards.evaluated(local_variables):
        return
    shorter = built.root.clone_manager(lambda node: node.get_source() not in follow)
    names = ", ".join(root.name for root in roots)
    shorter.add_lambda_guard(module_guards, [f"what was read of modules is unchanged: {names}"], None)
    if shorter.check(local_variables):
        built.check_verbose = built.root.check_verbose  # names the guard that failed
        built.root = shorter


def shorten_module_guards(package: str) -> None:
    """Have frames that are compiled for backends of a package guarded by `ModuleGuards`, from now on."""

    def shorten(built: Any, local_variables: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
        if is_compiling_for(package):
            try:
                _shorten(built, local_variables, namespace)
            except failures(Exception):  # another release's guards, in other forms: they stay as they are
                log.info("guards on modules stay Dynamo's", exc_info=True)

    after_guards_are_built(shorten)
