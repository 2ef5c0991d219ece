"""Removal of quantize operators after dequantize operators with the same parameters. Results are exactly equal.

    quantize(dequantize(q))             -> q
    quantize(view(dequantize(q)))       -> view(q)                     also permutations, slices, copies
    quantize(cat(dequantize(a), ...))   -> cat(a, ...)
    quantize(max_pool(dequantize(q)))   -> max_pool(q)                 quantizing keeps order
    quantize(clamp(dequantize(q)))      -> clamp(q, quantize(low), quantize(high))     ReLU, ReLU6
    quantize(max_pool(x))               -> max_pool(quantize(x))       pooling reads a quarter of the bytes
    quantize(cat(a, view(b), ...))      -> cat(quantize(a), view(quantize(b)), ...)    if kernels compute all parts; cat reads a quarter too
    quantize(clamp(x))                  -> quantize(x)                 if saturation clamps as well: uint8 after a ReLU
    dequantize(quantize(pad(x)))        -> pad(dequantize(quantize(x)))    before convolutions, which then pad themselves

Quantize operators also move up to the operator whose result they quantize, so that its kernel can write integers.

Rounding and saturating keep order, so they may change places with maxima and clamps. Zero is quantized without an error, so padding by zero may
change places with quantize and dequantize.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.graph.quantized import operator_name
from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, replace, replace_by_new

aten = torch.ops.aten

# Views of all elements of a tensor, and copies.
_MOVES = frozenset(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.clone.default,
    )
)
# Between these bounds, 255 steps and the reciprocal of a step are normal float32 numbers, so that quantize(dequantize(q)) is q.
_LEAST_SCALE, _MOST_SCALE = 1e-30, 1e30
_BOUNDS = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Parameters of a per-tensor quantization with a literal scale: scale, zero point, bounds and dtype."""

    scale: float
    zero_point: int
    low: int
    high: int
    dtype: torch.dtype

    @staticmethod
    def of(node: Node, name: str) -> _Numbers | None:
        """The parameters of a node that calls the per-tensor operator `name` with literal parameters; None for other nodes."""
        if operator_name(node) != f"{name}_per_tensor":
            return None
        arguments = node.args[1:6]
        if len(arguments) < 5 or any(isinstance(number, Node) for number in arguments):
            return None
        numbers = _Numbers(*arguments)  # type: ignore[arg-type]
        return numbers if _LEAST_SCALE <= numbers.scale <= _MOST_SCALE and numbers.dtype in _BOUNDS else None

    def quantized(self, value: float) -> int:
        """A value, rounded to float32, as PyTorch quantizes it."""
        if math.isinf(value):
            return self.low if value < 0 else self.high
        scaled = _float32(_float32(value) * _float32(1.0 / self.scale))
        return int(min(max(round(scaled) + self.zero_point, self.low), self.high))


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def quantized_pairs(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Rewrite quantize operators whose input comes from dequantize operators of the same scale, zero point and bounds.

    Results are equal bit by bit, as integers have no NaN. Quantizations whose scales are tensors are left alone.
    """
    if has_mutation(gm):
        return False
    changed = False
    for node in list(gm.graph.nodes):
        numbers = _Numbers.of(node, "quantize") if node.op == "call_function" else None
        if numbers is None:
            continue
        changed |= _simplify(gm, node, numbers)
    for node in list(gm.graph.nodes):
        changed |= node.op == "call_function" and _Numbers.of(node, "quantize") is not None and _move_up(node)
    return changed


def _move_up(node: Node) -> bool:
    """Move a quantize operator directly behind its input. A convolution in between would keep it out of the input's kernel."""
    source: Any = node.args[0]
    if source.op != "call_function" or all(
        between.target is operator.getitem or _Numbers.of(between, "quantize") is not None
        for between in _between(source, node)
    ):
        return False
    source.append(node)
    return True


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _simplify(gm: torch.fx.GraphModule, node: Node, numbers: _Numbers) -> bool:
    """Remove a quantize operator, or move or remove operators before it."""
    source: Any = node.args[0]
    if not _is_integer(source, numbers):
        return (
            _pool_integers(gm, node, source, numbers)
            or _join_integers(gm, node, source, numbers)
            or _pad_last(gm, node, source, numbers)
            or _drop_clamp(gm, node, source, numbers)
        )
    before = node.prev
    narrow = _integers(source, numbers, node, {})
    return replace(gm, node, narrow) if node.prev is before else replace_by_new(gm, node, narrow, before)


def _is_integer(node: Any, numbers: _Numbers) -> bool:
    """True if the value is exactly a dequantized integer under `numbers`: dequantized, then moved, pooled or clamped."""
    if not isinstance(node, Node) or node.op != "call_function" or node.meta["val"].dtype != torch.float32:
        return False
    if _Numbers.of(node, "dequantize") == numbers:
        source: Any = node.args[0]
        made_so = _Numbers.of(source, "quantize") == numbers
        return made_so or (numbers.low, numbers.high) == _BOUNDS[numbers.dtype]
    if node.target is aten.cat.default:
        return all(_is_integer(part, numbers) for part in node.args[0])  # type: ignore[union-attr]
    if _is_pooled(node):
        return _is_integer(node.all_input_nodes[0].args[0], numbers)
    if _clamp(node) is not None or node.target is aten.clone.default or (is_view(node) and not is_item(node)):
        return _is_integer(node.args[0], numbers)
    return False


def _is_pooled(node: Node) -> bool:
    """True if the value is the maxima of a pooling operator whose indices nothing reads."""
    pool = node.all_input_nodes[0] if is_item(node) else None
    return (
        pool is not None
        and pool.target is aten.max_pool2d_with_indices.default
        and all(user.args[1] == 0 or not user.users for user in pool.users)
    )


def _integers(node: Any, numbers: _Numbers, before: Node, made: dict[Node, Node]) -> Node:
    """The integers of a value for which `_is_integer` is true."""
    if node not in made:
        made[node] = _new_integers(node, numbers, before, made)
    return made[node]


def _new_integers(node: Node, numbers: _Numbers, before: Node, made: dict[Node, Node]) -> Node:
    target: Any = node.target
    if _Numbers.of(node, "dequantize") is not None:
        narrow: Node = node.args[0]  # type: ignore[assignment]
        return narrow
    if target is aten.cat.default:
        parts = [_integers(part, numbers, before, made) for part in node.args[0]]  # type: ignore[union-attr]
        return insert(before, target, parts, *node.args[1:], origin=node)
    if is_item(node):
        pool = node.all_input_nodes[0]
        return _maxima(before, pool, _integers(pool.args[0], numbers, before, made))
    source: Any = _integers(node.args[0], numbers, before, made)
    clamp = _clamp(node)
    if clamp is None:
        return insert(before, target, source, *node.args[1:], origin=node, **node.kwargs)
    low, high = map(numbers.quantized, clamp)
    if low > numbers.low:
        source = insert(before, aten.clamp_min.default, source, low, origin=node)
    return insert(before, aten.clamp_max.default, source, high, origin=node) if high < numbers.high else source


def _maxima(before: Node, pool: Node, source: Node) -> Node:
    """The maxima of `source`, pooled with the arguments of `pool`."""
    pooled = insert(before, aten.max_pool2d_with_indices.default, source, *pool.args[1:], origin=pool)
    with before.graph.inserting_before(before):
        maxima = before.graph.call_function(operator.getitem, (pooled, 0))
    maxima.meta = {**pooled.meta, "val": pooled.meta["val"][0]}
    return maxima


def _pool_integers(gm: torch.fx.GraphModule, node: Node, source: Any, numbers: _Numbers) -> bool:
    """Quantize before pooling instead of after it."""
    if not _is_read_by(source, node) or not _is_pooled(source):
        return False
    before = node.prev
    pool = source.all_input_nodes[0]
    x: Any = pool.args[0]
    if x.meta["val"].dtype != torch.float32:
        return False
    narrow = insert(node, node.target, x, *node.args[1:], origin=node)  # type: ignore[arg-type]
    if not replace_by_new(gm, node, _maxima(node, pool, narrow), before):
        return False
    for unused in (source, pool):
        gm.graph.erase_node(unused)
    _simplify(gm, narrow, numbers)
    return True


def _join_integers(gm: torch.fx.GraphModule, node: Node, source: Any, numbers: _Numbers) -> bool:
    """Quantize the parts of a concatenation instead of its result."""
    if not _is_read_by(source, node) or source.target is not aten.cat.default:
        return False
    parts: Any = source.args[0]
    if not all(_is_made(part) or _is_integer(part, numbers) for part in parts):
        return False
    before = node.prev
    narrow = {part: insert(node, node.target, part, *node.args[1:], origin=node) for part in parts}  # type: ignore[arg-type]
    joined = insert(node, source.target, [narrow[part] for part in parts], *source.args[1:], origin=source)
    if not replace_by_new(gm, node, joined, before):
        return False
    gm.graph.erase_node(source)
    for quantize in narrow.values():
        _simplify(gm, _before_moves(quantize), numbers)
    return True


def _before_moves(node: Node) -> Node:
    """Quantize before views and copies that nothing else reads, instead of after them, so that a transposed convolution's kernel can quantize.
    Returns the new quantize operator."""
    source: Any = node.args[0]
    while source.target in _MOVES and _is_read_by(source, node):
        x: Any = source.args[0]
        narrow = insert(node, node.target, x, *node.args[1:], origin=node)  # type: ignore[arg-type]
        node.replace_all_uses_with(
            insert(node, source.target, narrow, *source.args[1:], origin=source, **source.kwargs)
        )
        for unused in (node, source):
            node.graph.erase_node(unused)
        node, source = narrow, x
    return node


def _is_made(x: Node) -> bool:
    """True if a kernel computes the value, and so can write integers. Values that are only moved or joined would be copied once more."""
    while x.target in _MOVES:
        x = x.args[0]  # type: ignore[assignment]
    is_moved = (is_item(x) and not _is_pooled(x)) or is_view(x) or x.target is aten.cat.default
    return x.op == "call_function" and not is_moved and x.meta["val"].dtype == torch.float32


def _is_read_by(source: Any, node: Node) -> bool:
    """True if an operator computes the value, and only `node` reads it."""
    return isinstance(source, Node) and source.op == "call_function" and list(source.users) == [node]


def _pad_last(gm: torch.fx.GraphModule, node: Node, source: Any, numbers: _Numbers) -> bool:
    """Pad with zeros after dequantizing instead of before quantizing, if only convolutions read the result."""
    if not _is_read_by(source, node) or source.target is not aten.constant_pad_nd.default:
        return False
    given: tuple[Any, ...] = (*source.args, 0)
    x, pad, value = given[:3]
    images = 2 * (source.meta["val"].dim() - 2)
    if value != 0 or len(pad) > images or not all(isinstance(size, int) and size >= 0 for size in pad):
        return False
    if not numbers.low <= numbers.zero_point <= numbers.high or x.meta["val"].dtype != torch.float32:
        return False
    wide = next(iter(node.users), None) if len(node.users) == 1 else None
    if wide is None or _Numbers.of(wide, "dequantize") != numbers:
        return False
    if not all(user.target is aten.convolution.default and wide not in user.args[1:] for user in wide.users):
        return False
    before = wide.prev
    narrow = insert(wide, node.target, x, *node.args[1:], origin=node)  # type: ignore[arg-type]
    unpadded = insert(wide, wide.target, narrow, *wide.args[1:], origin=wide)  # type: ignore[arg-type]
    if not replace_by_new(gm, wide, insert(wide, source.target, unpadded, *source.args[1:], origin=source), before):
        return False
    for unused in (node, source):
        gm.graph.erase_node(unused)
    _simplify(gm, narrow, numbers)
    return True


def _clamp(node: Node) -> tuple[float, float] | None:
    """The bounds between which an operator clamps its input; None for other operators."""
    low: Any = -math.inf
    high: Any = math.inf
    match node.target:
        case aten.relu.default:
            low = 0.0
        case aten.relu6.default:
            low, high = 0.0, 6.0
        case aten.hardtanh.default | aten.clamp.default:
            ends: Any = (-1.0, 1.0) if node.target is aten.hardtanh.default else (None, None)
            names = ("min_val", "max_val") if node.target is aten.hardtanh.default else ("min", "max")
            given = [
                node.args[k + 1] if len(node.args) > k + 1 else node.kwargs.get(name, ends[k])
                for k, name in enumerate(names)
            ]
            low, high = (end if value is None else value for value, end in zip(given, (low, high), strict=True))
        case aten.clamp_min.default:
            low = node.args[1]
        case aten.clamp_max.default:
            high = node.args[1]
        case _:
            return None
    return (low, high) if isinstance(low, int | float) and isinstance(high, int | float) and low <= high else None


def _drop_clamp(gm: torch.fx.GraphModule, node: Node, source: Any, numbers: _Numbers) -> bool:
    """Remove a clamp that only this quantize operator reads, if saturation has the same effect."""
    clamp = _clamp(source) if _is_read_by(source, node) else None
    if clamp is None or source.meta["val"].dtype != torch.float32:
        return False
    if tuple(map(numbers.quantized, clamp)) != (numbers.low, numbers.high):
        return False
    node.replace_input_with(source, source.args[0])
    node.graph.erase_node(source)
    _simplify(gm, node, numbers)
    return True
