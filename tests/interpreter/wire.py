"""Kernels as JSON: what the interpreter's compiler writes, and its kernels are read from. Nothing that is read can run anything.

A kernel is a graph with shared parts: a list of nodes, each `[class, field, field, ...]`, where what another node is stands as `{"node": n}`.
"""

from __future__ import annotations

import json
from typing import Any

from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Mod, Scalar
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, FromIndex, Load
from torch_hybrid_backend.loops.kernels import (
    Argument,
    AttentionKernel,
    ConvKernel,
    Kernel,
    MapKernel,
    MatMulKernel,
    RowKernel,
    Stage,
    Store,
)
from torch_hybrid_backend.loops.layout import Strided
from torch_hybrid_backend.loops.ops import OPS

_FIELDS: dict[type, tuple[str, ...]] = {
    Argument: ("buffer", "layout"),
    AttentionKernel: (
        *("reads", "writes", "domain", "q", "q_vars", "k", "k_vars", "v", "v_vars", "score", "score_vars"),
        *("product", "scale", "causal", "accumulator", "stores", "nan_rows"),
    ),
    Buffer: ("shape", "dtype", "name"),
    Call: ("dtype", "op", "args"),
    Const: ("dtype", "value"),
    ConvKernel: (
        *("reads", "writes", "domain", "x_vars", "x", "w_vars", "w", "stride", "padding", "dilation", "groups"),
        *("accumulator", "stores", "transposed"),
    ),
    FloorDiv: ("numerator", "divisor"),
    FromIndex: ("dtype", "index"),
    Index: ("terms", "const"),
    Load: ("dtype", "buffer", "index"),
    LoopVar: ("name", "extent"),
    MapKernel: ("reads", "writes", "domain", "stores"),
    MatMulKernel: ("reads", "writes", "domain", "k", "a", "b", "accumulator", "stores"),
    Mod: ("numerator", "divisor"),
    RowKernel: ("reads", "writes", "domain", "axes", "stages"),
    Scalar: ("expr", "low", "high"),
    Stage: ("kind", "local", "value", "combiner", "store"),
    Store: ("buffer", "index", "value"),
    Strided: ("strides",),
}
_CLASSES = {kind.__name__: kind for kind in _FIELDS}


def encode(kernel: Kernel) -> str:
    """The kernel as JSON. Raises ScheduleError where it holds what the interpreter does not know."""
    nodes: list[list[Any]] = []
    numbers: dict[int, int] = {}

    def visit(value: object) -> Any:
        match value:
            case None | bool() | int() | str():
                return value
            case float():
                return {"float": repr(value)}
            case tuple():
                return [visit(item) for item in value]
        if type(value) not in _FIELDS:
            raise ScheduleError(f"the interpreter runs no {type(value).__name__}")
        if isinstance(value, Call) and value.op not in OPS:
            raise ScheduleError(f"the interpreter has no operation {value.op!r}")
        if id(value) not in numbers:  # a part of the kernel, which keeps it
            node = [type(value).__name__, *(visit(getattr(value, name)) for name in _FIELDS[type(value)])]
            numbers[id(value)] = len(nodes)
            nodes.append(node)
        return {"node": numbers[id(value)]}

    return json.dumps({"kernel": visit(kernel), "nodes": nodes})


def decode(text: str) -> Kernel:
    """The kernel again, with buffers of its own."""
    document = json.loads(text)
    made: list[Any] = []

    def value(item: Any) -> Any:
        match item:
            case {"float": digits}:
                return float(digits)
            case {"node": number}:
                return made[number]
            case list():
                return tuple(map(value, item))
        return item

    for name, *fields in document["nodes"]:
        kind = _CLASSES[name]
        made.append(kind(**dict(zip(_FIELDS[kind], map(value, fields), strict=True))))
    kernel = value(document["kernel"])
    assert isinstance(kernel, Kernel)
    return kernel
