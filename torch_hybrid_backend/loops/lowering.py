"""Lowering: ATen nodes -> values and loop operations.

A lowering is a function `(ctx, *args, **kwargs) -> Value | tuple[Value, ...]` registered for ATen overloads with `@lowers(...)`. It gets
the node's arguments with tensors replaced by `Value`s; `ctx.out` (or `ctx.outs`) is the result's spec as fake tensors know it, so that
type promotion and shape rules are PyTorch's own. It describes results lazily (`Map`) or asks `ctx.realize(op)` for memory where an
operation needs it (reductions, matmuls, convolutions). To refuse, it raises `Refuse(code, why)`: that, tried on placeholder
buffers, is also how capability is decided, so support and code can never disagree.

    @lowers(aten.neg.default)
    def neg(ctx: Context, x: Value) -> Value:
        return ctx.pointwise(lambda a: call("neg", a), x)
"""

from __future__ import annotations

import copy
import functools
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.tensor_spec import TensorSpec, dim, is_computable
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import (
    FLOAT8,
    Buffer,
    Expr,
    InverseFn,
    LoopOp,
    Map,
    MapOp,
    ReduceOp,
    ScalarFn,
    Value,
    compute_dtype,
    domain_vars,
)
from torch_hybrid_backend.loops.left_to_pytorch import left_to_pytorch
from torch_hybrid_backend.loops.ops import cast, const
from torch_hybrid_backend.loops.policy import COMMON, Abilities
from torch_hybrid_backend.loops.random_numbers import Generator
from torch_hybrid_backend.sizes.size import Dim, Size, UndecidedSizeError, known_less, lower_bound, product
from torch_hybrid_backend.torch_private import OpOverload, tree_map

DTYPES = frozenset(
    "float32 float64 bfloat16 float16 int64 int32 int16 int8 uint8 bool".split()
)  # what tensors of the loops language may hold


class Refuse(Exception):
    """Raised inside a lowering: the operator is refused with these arguments."""

    def __init__(self, code: Reason, why: str) -> None:
        super().__init__(why)
        self.refused = Refused(code, why)


Lowering = Callable[..., Any]
_TABLE: dict[OpOverload, Lowering] = {}
_UNREAD: dict[OpOverload, frozenset[str]] = {}
# Imported on first use: the table is these modules' contents and nothing else.
_MODULES = (
    "pointwise",
    "reductions",
    "views",
    "indexing",
    "matmul",
    "convolution",
    "pooling",
    "attention",
    "creation",
    "windows",
    "scans",
    "scatters",
    "recurrent",
    "bags",
    "gradients",
    "random_numbers",
    "sampling",
)
# Operators that exist only once the library that brings them is imported: namespace -> the module of their lowerings.
_MODULES_OF_LIBRARIES = {"quantized_decomposed": "quantized"}


def lowers(*targets: OpOverload, unread: tuple[str, ...] = ()) -> Callable[[Lowering], Lowering]:
    """Register a lowering for ATen overloads; a second registration of one overload is an error.

    `unread`: tensor arguments, by their names in the schema, that the lowering never reads; None may stand for them.
    """

    def register(fn: Lowering) -> Lowering:
        for target in targets:
            if target in _TABLE:
                raise ValueError(f"{target} has two lowerings: {_TABLE[target].__name__} and {fn.__name__}")
            _TABLE[target] = fn
            _UNREAD[target] = frozenset(unread)
        return fn

    return register


@functools.cache
def table() -> Mapping[OpOverload, Lowering]:
    """Every lowering, by ATen overload."""
    for module in _MODULES:
        importlib.import_module(f"torch_hybrid_backend.loops.lowerings.{module}")
    return _TABLE


def _lowering_of(target: object) -> Lowering | None:
    if not isinstance(target, OpOverload):
        return None
    lowerings = table()
    if target not in lowerings and target.namespace in _MODULES_OF_LIBRARIES:
        importlib.import_module(f"{__package__}.lowerings.{_MODULES_OF_LIBRARIES[target.namespace]}")
    return lowerings.get(target)


def _without_lowering(target: object) -> Refused:
    known = left_to_pytorch(target._opname) if isinstance(target, OpOverload) and target.namespace == "aten" else None
    return Refused(Reason.UNKNOWN_OPERATOR, f"there is no lowering for {target}") if known is None else known


class Context:
    """Things that a lowering may use: the node's result specs, a place for operations that need memory, what kernels can do, and the random
    generator of the region's device. `relied_on`: the sizes of which lowerings took for granted that they are not negative."""

    def __init__(
        self, emit: Callable[[LoopOp], None], abilities: Abilities = COMMON, generator: Generator | None = None
    ) -> None:
        self._emit = emit
        self.abilities = abilities
        self.generator = generator or Generator()
        self.refused: list[Map] = []
        self.relied_on: dict[Size, None] = {}
        self.node: torch.fx.Node | None = None
        self.outs: tuple[TensorSpec, ...] = ()

    @property
    def out(self) -> TensorSpec:
        """The spec of the node's (first) result."""
        return self.outs[0]

    def wants(self, position: int) -> bool:
        """True if the graph reads the node's result at `position`; where it does not, None may stand for it."""
        return self.node is not None and _reads(self.node, position)

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The shape of the node's (first) result."""
        return self.out.shape

    def rely_on(self, *sizes: Dim) -> None:
        """Have kernels run only if none of these sizes is negative: a position known only at run time then lies in its tensor."""
        self.relied_on.update((size, None) for size in sizes if isinstance(size, Size) and lower_bound(size) < 0)

    def realize(self, op: LoopOp) -> Buffer:
        """Emit an operation; its buffer can be read by everything that follows."""
        self._emit(op)
        return op.out

    def refuse(self, value: Value, is_refused: Callable[[Expr], Expr]) -> None:
        """Have a call raise PyTorch's error if `is_refused` (bool) holds for any element of `value`, if kernels have flags for it."""
        if not self.abilities.flags:
            return
        # An expanded tensor holds the elements of what it was expanded from.
        while isinstance(value, Map) and value.base is not None and _is_larger(value, value.base):
            value = value.base
        self.refused.append(Map(value.shape, "bool", lambda index: is_refused(value.at(index))))

    def materialize(self, value: Value) -> Buffer:
        """The value in memory: itself if it is a buffer already."""
        if isinstance(value, Buffer):
            return value
        if isinstance(value, Map) and value.realized is not None:
            return value.realized
        return self.realize(MapOp(Buffer(value.shape, value.dtype), value))

    def reduce(
        self, combiner: str, value: Value, axes: Sequence[int], body: ScalarFn | None = None, dtype: str | None = None
    ) -> Buffer:
        """Reduce `value` (or `body` over its shape) over `axes`; the result drops them and has `dtype` (value's by default)."""
        kept = tuple(n for d, n in enumerate(value.shape) if d not in axes)
        out = Buffer(kept, dtype or value.dtype)
        return self.realize(ReduceOp(out, value.shape, tuple(sorted(axes)), combiner, body or value.at))

    def pointwise(
        self,
        fn: Callable[..., Expr],
        *inputs: Value | float | Size,
        dtype: str | None = None,
        compute: str | None = None,
        shape: tuple[Dim, ...] | None = None,
    ) -> Map:
        """fn applied element by element with broadcasting.

        Tensor and number inputs reach `fn` as scalars of dtype `compute` (default: the compute dtype of the result); what it
        returns is cast to the compute dtype of `dtype` (default: the node's result dtype).
        """
        dtype = dtype or self.out.dtype
        shape = self.shape if shape is None else shape
        operand_dtype = compute or compute_dtype(dtype)
        values = [broadcast(v, shape) if isinstance(v, Value) else v for v in inputs]

        def at(index: tuple[Index, ...]) -> Expr:
            scalars = [
                cast(v.at(index), operand_dtype) if isinstance(v, Value) else const(v, operand_dtype) for v in values
            ]
            return cast(fn(*scalars), compute_dtype(dtype))

        return Map(shape, dtype, at, tuple((v, _identity) for v in values if isinstance(v, Value)))


def _is_larger(value: Value, base: Value) -> bool:
    return known_less(product(base.shape), product(value.shape))


def _identity(index: tuple[Index, ...]) -> tuple[Index, ...]:
    return index


def broadcast(value: Value, shape: tuple[Dim, ...]) -> Value:
    """The value expanded to `shape` by PyTorch's broadcasting rules."""
    if value.shape == shape:
        return value
    lead = len(shape) - len(value.shape)
    # A dimension is pinned to 0 only where it is stretched: where both are 1 the index is 0 anyway.
    stretched = [size == 1 for size in value.shape]

    def at(index: tuple[Index, ...]) -> Expr:
        return value.at(tuple(as_index(0) if s else i for s, i in zip(stretched, index[lead:], strict=True)))

    return Map(shape, value.dtype, at, base=value)


def reindex(
    value: Value,
    shape: tuple[Dim, ...],
    forward: Callable[[tuple[Index, ...]], tuple[Index, ...]],
    inverse: InverseFn | None = None,
) -> Value:
    """A view: element `index` of the result is element `forward(index)` of `value`.

    `inverse` maps the other way where the view is a bijection: it keeps the value usable as an epilogue.
    """
    parents = () if inverse is None else ((value, inverse),)
    return Map(shape, value.dtype, lambda index: value.at(forward(index)), parents, base=value)


def _specs(value: object) -> tuple[TensorSpec, ...]:
    if isinstance(value, torch.Tensor):
        return (TensorSpec.of(value),)
    if isinstance(value, (tuple, list)):
        return tuple(spec for item in value for spec in _specs(item))
    return ()


def check_tensor(tensor: torch.Tensor, abilities: Abilities = COMMON) -> Refused | None:
    """The reason why the loops language cannot hold a (fake) tensor, or None if it can."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return Refused(Reason.LAYOUT, f"a tensor has layout {tensor.layout}, only plain strided tensors are taken")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES and not (abilities.float8 and dtype in FLOAT8):
        return Refused(Reason.DTYPE, f"dtype {dtype} is not taken")
    spec = TensorSpec.of(tensor)
    if not spec.is_computable:
        return Refused(Reason.SYMBOLIC_SHAPE, f"the shape {spec.shape} depends on data")
    if 0 in spec.shape:
        return Refused(Reason.ARGUMENT, "a tensor has no elements")
    return None


def _reads(node: torch.fx.Node, position: int) -> bool:
    """True if any node reads the result at `position`."""
    return any(u.target is not operator.getitem or (u.args[1] == position and u.users) for u in node.users)


def _unread_inputs(node: torch.fx.Node) -> frozenset[torch.fx.Node]:
    """The inputs that the lowering does not read (`unread` of `lowers`)."""
    assert isinstance(node.target, OpOverload)
    names = _UNREAD[node.target]
    if not names:
        return frozenset()
    given = {argument.name: value for argument, value in zip(node.target._schema.arguments, node.args, strict=False)}
    given |= node.kwargs
    read = {value for name, value in given.items() if name not in names and isinstance(value, torch.fx.Node)}
    unread = {value for name, value in given.items() if name in names and isinstance(value, torch.fx.Node)}
    return frozenset(unread - read)


def lower_node(ctx: Context, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    """The value(s) of one call_function node; raises Refuse if a lowering refuses it. `values` holds a `Size` or int for a size."""
    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]  # type: ignore[index]
    lowering = _lowering_of(node.target)
    if lowering is None:
        unknown = _without_lowering(node.target)
        raise Refuse(unknown.code, unknown.why)
    meta = node.meta.get("val")
    outputs = meta if isinstance(meta, (tuple, list)) else (meta,)
    for position, tensor in enumerate(outputs):
        if tensor is None:
            continue
        if position and not _reads(node, position):
            continue  # batch norm's statistics, which are empty in eval; the states of generators beside attention
        if not isinstance(tensor, torch.Tensor):
            raise Refuse(Reason.NOT_A_TENSOR, f"{node.target} yields a {type(tensor).__name__}, not a tensor")
        if (refused := check_tensor(tensor, ctx.abilities)) is not None:
            raise Refuse(refused.code, refused.why)
    # A context of its own: values are lazy, and what they close over must not become the next node's.
    ctx = copy.copy(ctx)
    ctx.node, ctx.outs = node, _specs(meta)

    def argument(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            return values[item]
        return item

    args = [tree_map(argument, item, is_leaf=lambda i: isinstance(i, torch.fx.Node)) for item in node.args]
    kwargs = {k: tree_map(argument, v, is_leaf=lambda i: isinstance(i, torch.fx.Node)) for k, v in node.kwargs.items()}
    try:
        return lowering(ctx, *args, **kwargs)
    except UndecidedSizeError as undecided:
        raise Refuse(Reason.SYMBOLIC_SHAPE, f"{node.target}: {undecided}") from undecided


def supports(node: torch.fx.Node, abilities: Abilities = COMMON) -> Verdict:
    """Supported if a node can be lowered for kernels of these abilities; it is lowered on placeholder buffers to find out."""
    if node.op != "call_function":
        return Refused(Reason.UNKNOWN_OPERATOR, f"a node of kind {node.op} is not an operator")
    if node.target is operator.getitem:
        producer = node.args[0]
        if (
            isinstance(meta := node.meta.get("val"), torch.Tensor)
            and (refused := check_tensor(meta, abilities)) is not None
        ):
            return refused
        return supports(producer, abilities) if isinstance(producer, torch.fx.Node) else Supported()
    if _lowering_of(node.target) is None:
        return _without_lowering(node.target)
    placeholders: dict[torch.fx.Node, Any] = {}
    unread = _unread_inputs(node)
    for source in node.all_input_nodes:
        meta = source.meta.get("val")
        if source in unread:
            placeholders[source] = None
        elif isinstance(meta, torch.Tensor):
            if (refused := check_tensor(meta, abilities)) is not None:
                return refused
            spec = TensorSpec.of(meta)
            placeholders[source] = Buffer(spec.shape, spec.dtype)
        elif isinstance(meta, (int, torch.SymInt)) and not isinstance(meta, bool):
            placeholders[source] = dim(meta)
            if not is_computable(placeholders[source]):
                return Refused(Reason.SYMBOLIC_SHAPE, f"{source.name} is a number that depends on data")
        elif isinstance(meta, (torch.SymFloat, torch.SymBool)):
            return Refused(Reason.SYMBOLIC_SHAPE, f"{source.name} is a number that is only known at run time")
        else:
            return Refused(Reason.NOT_A_TENSOR, f"{source.name} is a {type(meta).__name__}, not a tensor")
    is_static = all(isinstance(n, int) for value in placeholders.values() for n in getattr(value, "shape", (value,)))
    try:
        # What is lazy may ask for the number behind a size, too: it is asked now, where that can still be refused.
        result = lower_node(Context(lambda op: None if is_static else _probe(op), abilities), node, placeholders)
        if not is_static:
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, Value):
                    value.at(domain_vars(value.shape))
    except Refuse as refuse:
        return refuse.refused
    except UndecidedSizeError as undecided:
        return Refused(Reason.SYMBOLIC_SHAPE, f"{node.target}: {undecided}")
    return Supported()


def _probe(op: LoopOp) -> None:
    """Evaluate the functions of an operation, so that they raise what they would raise later."""
    op.reads()
