"""Guards on modules that have not changed: one comparison of numbers in place of Dynamo's walk through the modules.

Leaves: `shorten_module_guards()`, after which frames compiled for a package are guarded so.

In every call Dynamo looks at each module, at each attribute that the trace read, and at each parameter: 5,500 guards for MobileNetV2, in memory
that the kernels of the last call drove out of the caches. All of these are values of dictionaries, and a watch of a module tells whether any of
its dictionaries has changed, or any tensor's form (`runtime/native/module_guard.py`). Where none has since Dynamo's guards held, they hold
again. Where one has, they decide, and the watch is renewed. What is no value of a plain dictionary below a module keeps its own guards.

`_Walk` finds the guards that follow from dictionaries, and the way to these. PyTorch has the same idea as
`use_recursive_dict_tags_for_guards`, off by default since 2.13, as it reads dictionaries that may be gone (pytorch/pytorch#181873, #188101).
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.runtime.native.module_guard import (
    DICTIONARY,
    MODULE,
    OWN_TENSOR,
    TENSOR,
    ModuleGuard,
    Root,
    Step,
    module_guard,
)
from torch_hybrid_backend.torch_private import after_guards_are_built, is_compiling_for

log = logging.getLogger(__name__)

# Guards on modules, on dictionaries and on constants that hold as long as the dictionaries on the way to them are unchanged.
_OF_MODULES = frozenset({"TYPE_MATCH", "ID_MATCH"})
_OF_DICTIONARIES = _OF_MODULES | {"DICT_CONTAINS", "DICT_LENGTH", "LENGTH_CHECK", "DICT_VERSION"}
_OF_CONSTANTS = _OF_MODULES | {"EQUALS_MATCH", "NONE_MATCH", "NOT_NONE", "TRUE_MATCH", "FALSE_MATCH", "LENGTH_CHECK"}
# Of a tensor that a dictionary holds: watches compare its form, and the dictionary of its own attributes, marks of dimensions among them.
_OF_TENSORS = _OF_CONSTANTS | {"TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD"}
_IS_NO_OTHER = "NO_TENSOR_ALIASING"  # than any tensor with this guard


@dataclass(slots=True)
class _Walk:
    """The dictionaries below a module that guards look into.

    follow, stay: sources of the guards that follow from these, and of others.
    own: the guards that a tensor is no other one that is guarded so may follow, too. steps, tensors: the way to dictionaries and tensors.
    """

    own: bool
    steps: list[Step] = field(default_factory=list)
    tensors: list[Step] = field(default_factory=list)
    follow: set[str] = field(default_factory=set)
    stay: set[str] = field(default_factory=set)

    def module(self, node: Any, module: nn.Module, parent: int = 0, key: str | None = None, position: int = 0) -> bool:
        """True if all guards on the module and below it follow. `node`: the module's, in Dynamo's tree of guards."""
        if type(module) is not node.get_type_of_guarded_value():
            return self._noted(node, False)
        here = self._step(parent, key, position, MODULE)
        follow = _has_only(node, _OF_MODULES)
        for accessor, child in _children(node):
            attributes = object.__getattribute__(module, "__dict__")
            if _reads_attributes(accessor) and type(attributes) is dict and attributes is vars(module):
                follow &= self._dictionary(child, attributes, here)
            else:
                follow = self._noted(child, False)
        return self._noted(node, follow)

    def _dictionary(self, node: Any, held: dict[Any, Any], here: int) -> bool:
        follow = _has_only(node, _OF_DICTIONARIES)
        if hasattr(node, "get_key_value_managers"):  # guarded in the order of its items
            items = list(held.items())
            follow &= not node.get_accessors()
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
        if not isinstance(value, torch.Tensor):
            return self._noted(node, _is_constant(node))
        own = self.own and _is_no_other(node)
        self.tensors.append((parent, key, position, OWN_TENSOR if own else TENSOR))
        return self._noted(node, _is_leaf(node, {*_OF_TENSORS, _IS_NO_OTHER} if own else _OF_TENSORS))

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


def _is_leaf(node: Any, guards: Set[str]) -> bool:
    """True for an immutable value or a tensor with none but these guards."""
    return (
        node.is_guarded_value_immutable()
        and not node.has_object_aliasing_guard()
        and _has_only(node, guards)
        and node.has_no_accessors()
    )


def _is_constant(node: Any) -> bool:
    """True for a number, a string or a tuple of these, without guards that depend on other things."""
    kinds = {type(guard).__name__ for guard in node.get_leaf_guards()}
    return (
        node.is_guarded_value_immutable()
        and not issubclass(node.get_type_of_guarded_value(), torch.Tensor)
        and not node.has_object_aliasing_guard()
        and kinds <= _OF_CONSTANTS
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
    built: Any, local_variables: Mapping[str, Any], namespace: Mapping[str, Any], own: bool
) -> tuple[list[Root], list[str | None], set[str]]:
    """(modules, names of tensors that must be none of the modules' own, sources of guards that follow). own: as of a `_Walk`."""
    roots: list[Root] = []
    follow: set[str] = set()
    stay: set[str] = set()
    holding = 0
    for name, of_globals, value, node in _variables(built.root, local_variables, namespace):
        if name is not None and isinstance(value, nn.Module):
            walk = _Walk(own)
            walk.module(node, value)
            if walk.follow - walk.stay:
                roots.append((name, of_globals, (*walk.steps, *walk.tensors)))
                holding += any(kind == OWN_TENSOR for *_, kind in walk.tensors)
            follow |= walk.follow
            stay |= walk.stay
    follow -= stay
    # Tensors of two modules were compared with each other, but not those of every two that the frame may meet.
    others: list[str | None] = [None] if holding > 1 else []
    if holding == 1:
        others = list(_others(built.root, follow))
    return roots, others, follow


def _shorten(built: Any, local_variables: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
    """Put a `ModuleGuard` in place of the guards that it stands for."""
    make = module_guard()
    if make is None:
        return
    roots, others, follow = _found(built, local_variables, namespace, own=True)
    if None in others:
        roots, others, follow = _found(built, local_variables, namespace, own=False)
    whole = built.root
    guard = make(tuple(roots), tuple(name for name in others if name is not None), whole)
    if not roots or not guard.check(local_variables):
        return
    shorter = whole.clone_manager(lambda node: node.get_source() not in follow)
    names = ", ".join(name for name, *_ in roots)
    shorter.add_lambda_guard(guard.check, [f"what was read of modules is unchanged: {names}"], None)
    if shorter.check(local_variables):
        built.root = shorter
        _keep_whole(built, whole, guard)


def _keep_whole(built: Any, whole: Any, guard: ModuleGuard) -> None:
    """Have Dynamo find all guards where it asks which have failed: in reports, and for calls that evaluate none but those (`set_stance`)."""

    def check_verbose(local_variables: Mapping[str, Any]) -> Any:
        guard.forget()
        try:
            return whole.check_verbose(local_variables)
        finally:
            guard.forget()  # these guards keep this thread's modes, in which other threads are not

    def of_whole(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            shorter, built.root = built.root, whole
            try:
                return method(*given)
            finally:
                built.root = shorter

        return call

    built.check_verbose = check_verbose
    built.collect_diff_guard_sources = of_whole(built.collect_diff_guard_sources)
    built.clone_with_chosen_sources = of_whole(built.clone_with_chosen_sources)


def shorten_module_guards(package: str) -> None:
    """Have frames that are compiled for backends of a package guarded by `ModuleGuard`, from now on."""

    def shorten(built: Any, local_variables: Mapping[str, Any], builder: Any) -> None:
        if is_compiling_for(package):
            try:
                _shorten(built, local_variables, builder.scope["G"])
            except failures(Exception):  # another release's guards, in other forms: they stay as they are
                log.info("guards on modules stay Dynamo's", exc_info=True)

    after_guards_are_built(shorten)
