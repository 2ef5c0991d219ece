"""Functions of torch's by their names: which yield nothing negative, and which write to what they are given.

A name is what eager and Dynamo have in common: `torch.relu`, `Tensor.relu` and `torch.ops.aten.relu.default` are "relu". What is written in
place ends with "_", but for `__setitem__` and its like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import BuiltinFunctionType
from typing import Any

from torch.nn import functional

from torch_hybrid_backend.torch_private import DYNAMO, HigherOrderOperator, OpOverload, OpOverloadPacket, compiled_nn

Function = Callable[..., Any]

# Never negative whatever it is given; NaN apart.
NEVER_NEGATIVE = frozenset("relu relu6 sigmoid hardsigmoid abs exp square softmax".split())

# Functions with an argument `inplace` that may make negative numbers of others. (What `F.threshold` tells modes of is `_threshold`.)
_MAY_WRITE = frozenset(
    "hardtanh celu selu rrelu mish alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split()
)
# Those of which it is known whether they do: the position of `inplace`, where it is not named.
_INPLACE = {"_threshold": 3, "hardswish": 1}
# Assignments, with the operators of Python that stand for them while Dynamo traces.
_ASSIGNS = frozenset(
    "setitem __set__ __setitem__ __delitem__ iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor iconcat".split()
)
# Without overrides, and with no "_" at their end.
_FREE = (functional.hardsigmoid, functional.hardswish, functional.sigmoid, compiled_nn.hardsigmoid, compiled_nn.relu6)
# Memory that these give away may be written to by anybody, at any time.
SHARES_MEMORY = frozenset("numpy __array__ __dlpack__ data_ptr untyped_storage storage _typed_storage".split())


def name_of(function: Function) -> str:
    """The name of a function of torch's; "namespace::name" for operators of other libraries.

    "" for all that may write, and whose name does not tell: functions that are not torch's, operators with arguments that they write to,
    `torch.dropout_` and its like. (Dynamo shows modes no function that writes in place, but methods, and what these yield is followed for
    `NEVER_NEGATIVE` alone.)
    """
    if isinstance(function, OpOverload | OpOverloadPacket):
        return _operator_name(function)
    if isinstance(function, HigherOrderOperator):
        return ""
    owner = getattr(function, "__objclass__", function)  # of a method written in C++: the class
    module = str(getattr(owner, "__module__", ""))
    if module.split(".", maxsplit=1)[0] not in ("torch", "_operator", "builtins") or module.startswith(DYNAMO):
        return ""
    name = str(getattr(function, "__name__", ""))
    if is_in_place(name) and _is_free(function) and name[:-1] not in NEVER_NEGATIVE:
        return ""
    return name


def is_in_place(name: str) -> bool:
    """True if its last letter says that a function writes to what it is given."""
    return name.endswith("_") and not name.endswith("__")


def may_write(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if a function of that name, from `name_of`, may write to a tensor that it is given."""
    if name in _INPLACE:
        position = _INPLACE[name]
        return bool(args[position] if len(args) > position else kwargs.get("inplace"))
    return (
        not name
        or is_in_place(name)
        or name in _MAY_WRITE
        or name in _ASSIGNS
        or (name.startswith("__i") and name.endswith("__"))
        or "out" in kwargs
    )


def is_shown_by_dynamo(function: Function) -> bool:
    """True if Dynamo shows a function to modes: not those for which torch has no overrides, as `torch.relu_`."""
    return not _is_free(function)


def _is_free(function: Function) -> bool:
    """A function that is no method and that Dynamo shows no mode."""
    if function in _FREE:
        return True
    return isinstance(function, BuiltinFunctionType) and is_in_place(function.__name__)


def _operator_name(operator: OpOverload | OpOverloadPacket) -> str:
    if isinstance(operator, OpOverload):
        qualified, overloads = operator._schema.name, [operator]
    else:
        qualified = operator._qualified_op_name
        overloads = [getattr(operator, overload) for overload in operator.overloads()]  # type: ignore[no-untyped-call]
    namespace, _, name = qualified.partition("::")
    if namespace == "aten" and is_in_place(name):
        return name
    writes = any(
        argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        for overload in overloads
        for argument in overload._schema.arguments
    )
    if writes:
        return ""
    return name if namespace == "aten" else qualified
