"""Lowering a region: FX graph of ATen operators -> LoopGraph, a list of loop operations over buffers.

Each node's value stays lazy (a `Map`, inlined into its readers) or gets memory (is materialized):
- a view never gets memory; its base does where an anchor (matmul, convolution, attention) reads it;
- a computed value gets memory when several operators read it, when it would be recomputed for every element of a larger tensor
  (broadcast, pooling window), when its expression has grown long, or when it is the epilogue of a convolution that a concatenation reads:
  the convolution writes as much either way, and the concatenation is left a copy;
- what is quantized gets memory, and what is dequantized does not, whoever reads it, where a backend multiplies integers: a byte is read for
  less than a float is;
- an anchor's epilogue gets memory where it takes less than the sums that would be read otherwise: by a reduction, or by an operator whose
  result another anchor stores;
- everything else is inlined.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import dim
from torch_hybrid_backend.loops.attention_scores import is_cheap_mask, tells_last_key
from torch_hybrid_backend.loops.cache_updates import is_cache_update
from torch_hybrid_backend.loops.index import Index, LoopVar, contiguous_strides, linear
from torch_hybrid_backend.loops.integer_products import integer_product
from torch_hybrid_backend.loops.ir import (
    AttentionGradientOp,
    AttentionOp,
    Buffer,
    Const,
    ConvOp,
    Expr,
    IntegerMatMulOp,
    Load,
    LoopOp,
    Map,
    MapOp,
    MatMulOp,
    ReduceOp,
    Value,
    buffers_of,
    count_calls,
    depth,
    domain_vars,
    loads_of,
)
from torch_hybrid_backend.loops.lowering import Context, lower_node
from torch_hybrid_backend.loops.lowerings.attention import MASKED_ATTENTION
from torch_hybrid_backend.loops.ops import call
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.loops.quantized import (
    is_dequantized,
    is_from_codebook,
    is_quantized,
    long_integers,
    quantized_operand,
)
from torch_hybrid_backend.loops.random_numbers import Generator
from torch_hybrid_backend.sizes.size import Dim, Size, product, size_hint

aten = torch.ops.aten

# Operators whose results are views or copies of one input: their readers count as readers of that input.
_VIEWS = frozenset(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.select.int,
        aten.slice.Tensor,
        operator.getitem,
    )
)
# Operators that read each element several times.
_WINDOWS = frozenset(
    (
        aten.max_pool2d_with_indices.default,
        aten.avg_pool2d.default,
        aten.avg_pool1d.default,
        aten._adaptive_avg_pool2d.default,
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d.vec,
    )
)
_CONCATENATIONS = frozenset((aten.cat.default, aten.stack.default))


@dataclass(frozen=True, slots=True, eq=False)
class LoopGraph:
    """Operations in execution order. `inputs` and `outputs`: those of the region, position by position.

    `literals`: the graph's own constant tensors (get_attr nodes), contiguous, with the buffers that stand for them. `generator`: the source of
    random numbers, None without any. `origins`: for each buffer that operations write, the name of the node whose value it is. `flags`: bool
    scalars that must be False; if one is True, PyTorch's operators refuse the values of this call. `relied_on`: sizes that must not be
    negative, or a read would be outside its tensor.
    """

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    literals: tuple[tuple[Buffer, torch.Tensor], ...]
    ops: tuple[LoopOp, ...]
    generator: Generator | None = None
    origins: Mapping[Buffer, str] = field(default_factory=dict)
    flags: tuple[Buffer, ...] = ()
    relied_on: tuple[Size, ...] = ()

    @property
    def needed(self) -> tuple[Buffer, ...]:
        """Buffers that are read when the region has run."""
        return (*self.outputs, *self.flags)


def lower_region(region: Region, policy: FusionPolicy) -> LoopGraph:
    """Lower a region; raises lowering.Refuse if a node has no lowering, or its lowering refuses the arguments."""
    return _Lowerer(region, policy).run()


class _Lowerer:
    def __init__(self, region: Region, policy: FusionPolicy) -> None:
        self._region = region
        self._policy = policy
        self._ops: list[LoopOp] = []
        self._generator = Generator(by_value=not region.device.is_host)
        self._ctx = Context(self._emit, policy.abilities, self._generator)
        self._summed: set[Buffer] = set()  # what products and convolutions write
        self._convolved: set[Buffer] = set()  # what convolutions write
        self._images: set[Buffer] = set()  # the same, and of what their epilogues write
        self._concatenated: set[Value] = set()  # the values that are concatenations
        self._origins: dict[Buffer, str] = {}
        self._makers: dict[Value, str] = {}  # of values that may be given memory later
        self._nested: dict[Value, int] = {}  # how many values one upon another are computed where one is read

    def run(self) -> LoopGraph:
        values: dict[torch.fx.Node, Any] = {}
        inputs: list[Buffer] = []
        literals: list[tuple[Buffer, torch.Tensor]] = []
        outputs: tuple[Any, ...] = ()
        for node in self._region.graph_module.graph.nodes:
            if node.op == "placeholder":
                region_input = self._region.inputs[len(inputs)]
                spec = region_input.spec
                if spec is None:  # a size: kernels get those they need, and no buffer is read for it
                    values[node] = dim(node.meta["val"])
                    inputs.append(Buffer((), "int64", region_input.name))
                    continue
                by_value = len(inputs) in self._region.numbers
                is_constant = region_input.is_constant and not by_value
                values[node] = Buffer(spec.shape, spec.dtype, region_input.name, is_constant, by_value)
                inputs.append(values[node])
            elif node.op == "get_attr":
                tensor = operator.attrgetter(str(node.target))(self._region.graph_module).detach().contiguous()
                dtype = str(tensor.dtype).removeprefix("torch.")
                values[node] = Buffer(tuple(tensor.shape), dtype, str(node.target), constant=True)
                literals.append((values[node], tensor))
            elif node.op == "output":
                outputs = tuple(node.args[0])
            else:
                before = len(self._ops)
                values[node] = lower_node(self._ctx, node, values)
                for value in values[node] if isinstance(values[node], tuple) else (values[node],):
                    if isinstance(value, Map):
                        self._makers.setdefault(value, node.name)
                    self._place(node, value)
                    self._nest(node, value, values)
                if any(isinstance(op, ReduceOp) for op in self._ops[before:]):
                    for source in node.all_input_nodes:
                        if isinstance(values[source], Value):
                            self._place_narrow(values[source])
                for op in self._ops[before:]:
                    for out in op.outs:
                        self._origins.setdefault(out, node.name)
        taken = set(inputs) | {b for b, _ in literals}
        results: list[Buffer] = []
        for node in outputs:
            results.append(self._output(values[node], taken))
            self._origins.setdefault(results[-1], node.name)
            taken.add(results[-1])
        flags = self._flags()
        ops = tuple(map(self._with_quantized, in_order(self._ops, [*results, *flags])))
        generator = self._generator if self._generator.draws else None
        return LoopGraph(
            tuple(inputs),
            tuple(results),
            tuple(literals),
            ops,
            generator,
            self._origins,
            flags,
            tuple(self._ctx.relied_on),
        )

    def _with_quantized(self, op: LoopOp) -> LoopOp:
        """The operation with its right operand as integers, where that is quantized. All values that get memory have it by now."""
        if (
            not isinstance(op, MatMulOp)
            or isinstance(op, IntegerMatMulOp)
            or not self._policy.abilities.integer_products
        ):
            return op
        quantized = quantized_operand(op.b)
        return op if quantized is None else replace(op, quantized=quantized)

    def _flags(self) -> tuple[Buffer, ...]:
        """Flags of the refusals, one for all of one domain. Each is a kernel of its own, so that fusion of the values does not change."""
        by_shape: dict[tuple[Dim, ...], list[Map]] = {}
        for value in self._ctx.refused:
            condition = value.at(domain_vars(value.shape))
            if not isinstance(condition, Const) or condition.value:
                by_shape.setdefault(value.shape, []).append(value)
        return tuple(self._flag(shape, values) for shape, values in by_shape.items())

    def _flag(self, shape: tuple[Dim, ...], values: Sequence[Map]) -> Buffer:
        def any_of(index: tuple[Index, ...]) -> Expr:
            return functools.reduce(lambda a, b: call("or", a, b), (value.at(index) for value in values))

        refused = Map(shape, "bool", any_of)
        if not shape:
            return self._ctx.realize(MapOp(Buffer((), "bool"), refused))
        return self._ctx.reduce("any", refused, range(len(shape)))

    def _output(self, value: Value, taken: set[Buffer]) -> Buffer:
        """The value in memory of its own: AOTAutograd forbids an output that shares storage with an input or another output."""
        # What is dequantized is written for the caller alone.
        if isinstance(value, Map) and value.base is None and not self._is_read_as_integers(value):
            value = self._realize(value)
        if isinstance(value, Buffer) and value not in taken:
            return value
        return self._ctx.realize(MapOp(Buffer(value.shape, value.dtype), value))

    def _emit(self, op: LoopOp) -> None:
        if self._policy.abilities.integer_products and isinstance(op, MatMulOp | ConvOp):
            found = integer_product(op, self._narrow)
            if found is not None:
                *products, scaled = found
                for product in products:
                    self._emit(product)
                self._ops.append(scaled)
                self._summed.add(op.out)
                if isinstance(op, ConvOp):
                    self._convolved.add(op.out)
                    self._images.add(op.out)
                return
        match op:
            case MatMulOp():
                op = replace(op, a=self._rows(self._operand(op.a)), b=self._matrix(op.b))
            case ConvOp():
                x = op.x if self._is_part(op) else self._image(op.x)
                op = replace(op, x=x, w=self._operand(op.w))
                self._convolved.add(op.out)
                self._images.add(op.out)
            case AttentionOp():
                op = replace(op, q=self._queried(op.q), k=self._attended(op.k), v=self._attended(op.v))
            case AttentionGradientOp():
                q, grad = self._operand(op.q), self._operand(op.grad)
                op = replace(op, q=q, grad=grad, k=self._attended(op.k), v=self._attended(op.v))
        if isinstance(op, MatMulOp | ConvOp):
            self._summed.add(op.out)
        self._ops.append(op)

    def _narrow(self, value: Value) -> Value:
        """The integers of a product's operand, in memory."""
        return self._realize(value) if isinstance(value, Map) else value

    def _realize(self, value: Map, place: int | None = None) -> Buffer:
        """The buffer of a value, filled by a new operation, the last one so far or number `place`."""
        if value.realized is None:
            buffer = Buffer(value.shape, value.dtype)
            # The operation keeps the definition; from now on readers of `value` read the buffer.
            definition = Map(value.shape, value.dtype, value.fn, value.parents)
            self._ops.insert(len(self._ops) if place is None else place, MapOp(buffer, definition))
            value.realize(buffer)
            if value in self._makers:
                self._origins[buffer] = self._makers[value]
        assert value.realized is not None
        return value.realized

    def _operand(self, value: Value) -> Value:
        """An anchor's operand: a buffer or a view of one."""
        root = _root(value)
        if isinstance(root, Map) and root.realized is None:
            if self._is_read_as_integers(root):  # and written for this anchor alone
                return self._ctx.realize(MapOp(Buffer(value.shape, value.dtype), value))
            self._realize(root)
        return value

    def _is_read_as_integers(self, value: Value) -> bool:
        """True if integer products may read a value through its definition. The value then gets no memory, which would hold floats."""
        return self._policy.abilities.integer_products and is_dequantized(value)

    def _matrix(self, value: Value) -> Value:
        """The right operand of a matmul: as `_operand`, or a constant of 8 or 4 bits, dequantized or from a codebook, as it is."""
        is_narrow = self._policy.abilities.integer_products and (is_dequantized(value) or is_from_codebook(value))
        if is_narrow and all(buffer.constant for buffer in buffers_of(value)):
            return value
        return self._operand(value)

    def _attended(self, value: Value) -> Value:
        """Keys or values of attention. Where the policy says so, a cache with a new position or in pages is read as it is, not copied."""
        if self._policy.updates_in_attention and is_cache_update(value):
            return value
        if self._policy.gathers_in_attention and isinstance(value.at(domain_vars(value.shape)), Load):
            return value
        return self._queried(value)

    def _queried(self, value: Value) -> Value:
        """An operand of attention: dequantized integers stay a definition, any other value gets memory."""
        if self._policy.abilities.integer_products and is_dequantized(value):
            return value
        return self._operand(value)

    def _image(self, value: Value) -> Buffer:
        """A convolution's input, in memory. A shuffled concatenation is written as it is read, once for all its readers."""
        if isinstance(value, Map) and value.realized is None and _root(value) in self._concatenated:
            return self._realize(value)
        return self._ctx.materialize(self._operand(value))

    def _is_part(self, op: ConvOp) -> bool:
        """True if a convolution's input is some channels of what another one writes, in whole blocks: its kernel reads them in place."""
        value = op.x
        if op.groups != 1 or not isinstance(value, Map) or value.realized is not None or len(value.shape) != 4:
            return False
        index = domain_vars(value.shape)
        load = value.at(index)
        if not isinstance(load, Load) or load.buffer not in self._images or len(load.index) != 4:
            return False
        shift = load.index[1] - index[1]
        in_place = (load.index[0], *load.index[2:]) == (index[0], *index[2:])
        if not in_place or shift.terms or not isinstance(shift.const, int):
            return False
        return shift.const % self._policy.channel_block == 0

    def _rows(self, value: Value) -> Value:
        """The left operand of a matmul, copied unless its rows are contiguous in k, or kernels read strides along both."""
        if isinstance(value, Buffer):
            return value
        index = domain_vars(value.shape, "m")
        expr = value.at(index)
        if isinstance(expr, Load):
            k = index[-1].terms[0][0] if index[-1].terms else None
            offset = linear(expr.index, contiguous_strides(expr.buffer.shape))
            own = [(atom, c) for atom, c in offset.terms if atom == k or not isinstance(atom, LoopVar)]
            if k is None or own == [(k, 1)]:
                return value
            if not self._policy.copies_columns and not _is_computed(offset, index[1:]):
                return value
        return self._ctx.realize(MapOp(Buffer(value.shape, value.dtype), value))

    def _place(self, node: torch.fx.Node, value: Value | None) -> None:
        """Give a computed value memory where recomputing it would cost more."""
        if not isinstance(value, Map) or value.base is not None or value.realized is not None:
            return
        if self._policy.updates_in_attention and is_cache_update(value) and _is_attended(node):
            return
        expr = value.at(domain_vars(value.shape))
        if self._policy.abilities.integer_products:
            if is_quantized(expr):
                self._realize(value)
                return
            if (integers := long_integers(value)) is not None:
                self._realize(integers)
            padded = value.zero_padded and value.zero_padded[0]  # as a convolution reads it
            if is_dequantized(value) or (padded and is_dequantized(padded)):
                return
        calls = count_calls(expr)
        if (
            calls > self._policy.max_inline_calls
            or len(loads_of(expr)) > self._policy.max_inline_loads
            or depth(expr) > self._policy.max_depth
        ):
            self._realize(value)
            return
        if calls == 0:
            return
        self._place_epilogues(value, expr)
        if node.target in _CONCATENATIONS:
            self._concatenated.add(value)
        readers = _readers(node)
        if (self._policy.gathers_in_attention and is_cheap_mask(expr)) or (
            self._policy.skips_keys and tells_last_key(value)
        ):
            # Every attention computes its mask where it needs it: what can be seen is derived from the expression.
            readers = [reader for reader in readers if not _is_mask(reader, node)]
        if (
            len({_reader_key(reader) for reader in readers}) > 1
            or any(self._repeats(reader, value) for reader in readers)
            or (any(reader.target in _CONCATENATIONS for reader in readers) and self._is_epilogue(value, expr))
        ):
            buffer = self._realize(value)
            if self._is_epilogue(value, expr):
                self._images.add(buffer)

    def _nest(self, node: torch.fx.Node, value: Value | None, values: Mapping[torch.fx.Node, Any]) -> None:
        """Give memory to a value, also to a view's, if too many others would be computed where it is read."""
        if not isinstance(value, Map) or value.realized is not None:
            return
        sources = [values[source] for source in node.all_input_nodes]
        read = [s for source in sources for s in (source if isinstance(source, tuple) else (source,))]
        nested = 1 + max((self._nested.get(s, 0) for s in read if isinstance(s, Map) and s.realized is None), default=0)
        if nested > self._policy.max_depth:
            self._realize(value)
        else:
            self._nested[value] = nested

    def _place_epilogues(self, value: Map, expr: Expr) -> None:
        """Give memory to epilogues that a value is computed from. The value itself is an epilogue of the last anchor that it reads."""
        anchors = {load.buffer for load in loads_of(expr)} & self._summed
        if len(anchors) > 1:
            places = self._places()
            last = max(anchors, key=places.__getitem__)
            for parent, _ in value.parents:
                self._place_narrow(parent, last)

    def _place_narrow(self, value: Value, except_for: Buffer | None = None) -> None:
        """Give memory to an epilogue that is smaller than the anchor's sums, in the anchor's place: so it stays that anchor's epilogue."""
        if not isinstance(value, Map) or value.realized is not None or value.base is not None:
            return
        read = set(buffers_of(value))
        if except_for not in read and any(_bytes(value) < _bytes(sums) for sums in self._summed & read):
            places = self._places()
            self._realize(value, 1 + max(places[buffer] for buffer in read & places.keys()))

    def _places(self) -> dict[Buffer, int]:
        """Places of the operations that fill each buffer."""
        return {out: place for place, op in enumerate(self._ops) for out in op.outs}

    def _is_epilogue(self, value: Map, expr: Expr) -> bool:
        """True if a value is computed element by element from what a convolution writes."""
        index = domain_vars(value.shape)
        return any(load.buffer in self._convolved and load.index == index for load in loads_of(expr))

    def _repeats(self, reader: torch.fx.Node, value: Value) -> bool:
        if reader.target in _WINDOWS:
            return True
        meta = reader.meta.get("val")
        return isinstance(meta, torch.Tensor) and _elements(meta) > 2 * size_hint(product(value.shape))


def _is_mask(reader: torch.fx.Node, node: torch.fx.Node) -> bool:
    """True if attention reads the node, seen through views, as its mask."""
    if reader.target in _VIEWS:
        return bool(reader.users) and all(_is_mask(user, reader) for user in reader.users)
    if reader.target not in MASKED_ATTENTION:
        return False
    # Through views that do not grow: whichever argument is not q, k or v.
    return not any(_seen_through(operand) is _seen_through(node) for operand in reader.args[:3])


def _is_attended(node: torch.fx.Node) -> bool:
    """True if all that reads the node, seen through views, is attention, as its keys or values."""

    def attends(user: torch.fx.Node) -> bool:
        if user.target in _VIEWS:
            return _is_attended(user)
        return user.target in MASKED_ATTENTION and node in user.args[1:3] and node not in (user.args[0], *user.args[3:])

    return bool(node.users) and all(map(attends, node.users))


def _seen_through(node: Any) -> Any:
    while isinstance(node, torch.fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    return node


def _is_computed(offset: Index, index: Sequence[Index]) -> bool:
    """True if an offset is more than the index's variables times strides: read from memory, or a quotient of a variable."""
    variables = [atom for i in index for atom, _ in i.terms if isinstance(atom, LoopVar)]
    return any(not isinstance(leaf, LoopVar) for leaf in offset.leaves()) or any(map(offset.divides, variables))


def _root(value: Value) -> Value:
    """The base of a view; the value itself if it is no view."""
    while isinstance(value, Map) and value.realized is None and value.base is not None:
        value = value.base
    return value


def _reader_key(reader: torch.fx.Node) -> torch.fx.Node:
    """A key for a reader. Convolutions of one image have the same key: the image is in memory once."""
    image = reader.args[0] if reader.target is aten.convolution.default else None
    return image if isinstance(image, torch.fx.Node) else reader


def _bytes(value: Value) -> int:
    """Bytes that a value takes in memory, at typical sizes."""
    dtype = getattr(torch, value.dtype)
    assert isinstance(dtype, torch.dtype)
    return size_hint(product(value.shape)) * dtype.itemsize


def _elements(tensor: torch.Tensor) -> int:
    """Number of elements of a fake tensor, at typical sizes. Asking the tensor itself would install a guard on its sizes."""
    return size_hint(product(map(dim, tensor.shape)))


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operators that read a node's result, seen through views; a view that enlarges its input is a reader itself."""
    found: list[torch.fx.Node] = []
    stack = list(node.users)
    while stack:
        user = stack.pop()
        meta, own = user.meta.get("val"), node.meta.get("val")
        grows = (
            isinstance(meta, torch.Tensor)
            and isinstance(own, torch.Tensor)
            and _elements(meta) > 2 * max(1, _elements(own))
        )
        if user.target in _VIEWS and not grows:
            stack.extend(user.users)
        else:
            found.append(user)
    return found


def in_order(ops: Sequence[LoopOp], outputs: Sequence[Buffer]) -> tuple[LoopOp, ...]:
    """The operations that the outputs need, each after those it reads.

    Operations whose results are never read are dropped (a pooling's unused indices, a log-sum-exp). The order may change: a value may get
    memory, as an output or an anchor's operand, after an operation was emitted that reads it, and then the operation reads the memory.
    """
    producer = {out: op for op in ops for out in op.outs}
    reads = {op: op.reads() for op in ops}
    ordered: dict[LoopOp, None] = {}
    needed = set(outputs)
    pending = [producer[key] for key in needed if key in producer]
    while pending:
        for buffer in reads[pending.pop()]:
            if buffer not in needed:
                needed.add(buffer)
                if (source := producer.get(buffer)) is not None:
                    pending.append(source)
    for op in ops:
        stack = [] if needed.isdisjoint(op.outs) else [op]
        while stack:
            sources = (producer[buffer] for buffer in reads[stack[-1]] if buffer in producer)
            missing = next((source for source in sources if source not in ordered), None)
            if missing is None:
                ordered[stack.pop()] = None
            else:
                stack.append(missing)
    return tuple(ordered)
