"""Operators that a plan calls by the C interface of PyTorch's dispatcher, without Python."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.core.operator_schema import is_native
from torch_hybrid_backend.core.tensor_spec import TensorSpec, dim, is_computable
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.graph.schema import has_effects, is_item, only_draws
from torch_hybrid_backend.torch_private import OpOverload

# What plans know: the names in `csrc/src/dtype.cc`. Quantized tensors, and integers of a few bits, are not among them.
_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 complex128 "
    "float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
_DTYPES = frozenset(getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name))


def why_python(node: Node, *, draws: bool) -> str:
    """The reason why a plan needs Python to run an operator in eager; "" if the plan calls the operator itself.

    `draws`: operators may draw random numbers.
    """
    value = node.meta.get("val")
    if is_item(node) or node.op == "placeholder" or isinstance(value, int | torch.SymInt):
        return _why_unknown(node, value)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return f"{node.target} is no operator of PyTorch's"
    if has_effects(node) and not (draws and only_draws(node)):
        return f"{node.target} does more than compute its value"
    for each in node.all_input_nodes:
        read = each.meta.get("val")
        if isinstance(read, torch.Tensor) and (why := _why_unknown(each, read)):
            return why
    schema, target = node.target._schema, node.target
    values: Any = (value,) if len(schema.returns) == 1 else value
    arguments = arguments_of(node)
    unknown = next((each for each in arguments.values() if isinstance(each, torch.dtype) and each not in _DTYPES), None)
    if unknown is not None:
        return f"plans know no {unknown}"
    overload = "" if target._overloadname == "default" else target._overloadname
    results = tuple(() if isinstance(each, list | tuple) else None for each in values)
    try:
        if not is_native(schema.name, overload, tuple(arguments.values()), results):
            return f"the C interface of PyTorch's dispatcher cannot call {target}"
    except HybridError as error:
        return f"{target}: {error}"
    # Of several results those count that are read, by items.
    return "" if isinstance(value, list | tuple) else _why_unknown(node, value)


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a call of an operator by name, in the order of its schema, defaults among them; lists are tuples."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((each.name for each in arguments), node.args, strict=False)) | node.kwargs
    return {each.name: _argument(given.get(each.name, each.default_value), each) for each in arguments}


def _argument(value: Any, argument: Any) -> Any:
    kind = argument.real_type
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    # One number may stand for all of a list of fixed length.
    is_one = kind.kind() == "ListType" and argument.N is not None and isinstance(value, int | float)
    return (value,) * argument.N if is_one else _with_tuples(value)


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value


def _why_unknown(node: Node, value: Any) -> str:
    """The reason why a plan does not know a value ahead of calls; "" if the value is a plain tensor of the host, or a size."""
    if isinstance(value, list | tuple):
        return ""
    if isinstance(value, int | torch.SymInt):
        return "" if is_computable(dim(value)) else f"{node.target} is a number that depends on data"
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in _DTYPES
    if not is_plain or LazyBits.of(value):
        return f"{node.target} has a value that is no plain tensor"
    spec = TensorSpec.of(value)
    if not spec.device.is_host or not spec.is_computable:
        return f"{node.target} has a value on another device than the CPU, or sizes that depend on data"
    return ""
