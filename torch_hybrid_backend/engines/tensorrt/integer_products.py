"""Rewrites quantized graphs to a form for which TensorRT's builder makes integer products.

    mm(dequantize(a, s), dequantize(b, t))    becomes    mm(dequantize(a, 1), dequantize(b, 1)) * s * t

The builder makes an integer product if both operands are dequantized by constant scales. Scales of live weights are no constants, nor are
scales found in each call. So scales are factored out of products of two quantized operands: the product sums integers, exactly, and its result
is scaled. If only the weight is quantized, its scale stays: the builder then dequantizes in the product's kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.engines.tensorrt.quantization import MOVES, NARROW, arguments_of, dtype_of
from torch_hybrid_backend.graph.quantized import operator_name

aten = torch.ops.aten

_QUANTIZE, _DEQUANTIZE = "quantize_per_tensor", "dequantize_per_tensor"


def factor_out_scales(module: torch.fx.GraphModule) -> None:
    """Rewrite a lowered graph with metadata, in place. Afterwards it quantizes by constant scales only, and dequantizes by constant scales or
    scales of channels. Other scales are multiplications, and so are the scales of products of two quantized operands."""
    rewriter = _Rewriter(module)
    for node in list(module.graph.nodes):
        rewriter.rewrite(node)
    module.graph.eliminate_dead_code()
    for node in list(module.graph.nodes):
        rewriter.rewrite_product(node)
    module.graph.eliminate_dead_code()
    module.recompile()


class _Rewriter:
    """Rewrites one graph. `_scaled`: dequantized value -> its integers, its scale, and true if the scale is one of rows."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._graph = module.graph
        self._scaled: dict[Node, tuple[Node, Node, bool]] = {}
        for node in module.graph.find_nodes(op="get_attr"):
            node.meta.setdefault("val", operator.attrgetter(str(node.target))(module))

    # operators, one by one

    def rewrite(self, node: Node) -> None:
        title = operator_name(node)
        if title is not None and title.startswith("quantize"):
            self._rewrite_quantize(node, title)
        elif title in ("dequantize_per_tensor.tensor", "dequantize_per_token"):
            arguments = arguments_of(node)
            by_rows = title == "dequantize_per_token"
            with self._graph.inserting_before(node):
                scale = arguments["scales"] if by_rows else self._call(aten.reshape.default, arguments["scale"], [])
                wide = self._call(aten.mul.Tensor, self._unit(arguments["input"]), scale)
                self._scaled[wide] = arguments["input"], scale, by_rows
                self._replace(node, wide)

    def _rewrite_quantize(self, node: Node, title: str) -> None:
        """Rewrite quantize(x, scale) as quantize(x / scale, 1), with PyTorch's order of roundings. For float8, x / scale is first rounded to
        integers."""
        arguments = arguments_of(node)
        x, dtype = arguments["input"], arguments["dtype"]
        scale = arguments.get("scale", arguments.get("scales"))
        if title == _QUANTIZE and dtype is torch.int8:
            return
        with self._graph.inserting_before(node):
            x = self._cast(x, torch.float32)
            factor: Any = None if isinstance(scale, Node) else 1.0 / scale
            if isinstance(scale, Node):
                factor = self._call(aten.reciprocal.default, self._shaped(scale, title, arguments, x))
            x = self._call(aten.mul.Tensor, x, factor)
            if dtype is torch.int8:
                operator_of = torch.ops.quantized_decomposed.quantize_per_tensor.default
                made = self._call(operator_of, x, 1.0, 0, -128, 127, torch.int8)
            else:
                x = self._call(aten.round.default, x)
                x = self._call(aten.clamp.default, x, arguments["quant_min"], arguments["quant_max"])
                made = self._call(aten._to_copy.default, x, dtype=dtype)
            self._replace(node, made)

    def _shaped(self, scale: Node, title: str, arguments: Mapping[str, Any], x: Node) -> Node:
        """Scales in the shape for multiplication: scales of rows unchanged, scales of channels along their dimension."""
        if title == "quantize_per_token":
            return scale
        if title != "quantize_per_channel":
            return self._call(aten.reshape.default, scale, [])
        shape = [1] * x.meta["val"].dim()
        shape[arguments["axis"]] = -1
        return self._call(aten.reshape.default, scale, shape)

    # products

    def rewrite_product(self, node: Node) -> None:
        """Rewrite a product of two dequantized operands as the product of their integers times both scales."""
        places = _OPERANDS.get(node.target)
        if places is None or not _is_plain(node):
            return
        left, right = (self._operand(node.args[place]) for place in places)
        if left is None or right is None or left.dtype is not right.dtype:
            return
        is_convolution = node.target is aten.convolution.default
        result = node.meta["val"]
        scales = [left.rows(result.dim(), is_convolution), right.columns(result.dim(), is_convolution)]
        if any(scale is None for scale in scales):
            return
        with self._graph.inserting_before(node):
            given = list(node.args)
            for place, each in zip(places, (left, right), strict=True):
                given[place] = self._unscaled(each)
            bias: Any = given[_BIASES[node.target]] if node.target in _BIASES else None
            if node.target is aten.addmm.default:
                wide = self._call(aten.mm.default, *given[1:])
            else:
                if is_convolution:
                    given[2] = None
                wide = self._call(node.target, *given)
            for scale in scales:
                assert scale is not None
                factor, shape = scale
                if isinstance(factor, Node):
                    factor = self._cast(factor, torch.float32)
                    factor = self._call(aten.reshape.default, factor, list(shape))
                elif factor == 1.0:
                    continue
                wide = self._call(aten.mul.Tensor, wide, factor)
            if bias is not None:
                bias = self._cast(bias, torch.float32)
                if is_convolution:
                    bias = self._call(aten.reshape.default, bias, [1, -1, *[1] * (result.dim() - 2)])
                wide = self._call(aten.add.Tensor, wide, bias)
            self._replace(node, wide)

    def _operand(self, value: object) -> _Operand | None:
        """A quantized operand of a product; None for other values."""
        moves: list[Node] = []
        while isinstance(value, Node):
            if value in self._scaled:
                integers, scale, by_rows = self._scaled[value]
                return _Operand(integers, scale, moves, by_rows=by_rows)
            if operator_name(value) == _DEQUANTIZE:
                arguments = arguments_of(value)
                return _Operand(arguments["input"], arguments["scale"], moves)
            if operator_name(value) == "dequantize_per_channel":
                arguments = arguments_of(value)
                return _Operand(arguments["input"], arguments["scales"], moves, axis=arguments["axis"])
            if _widens(value):
                return _Operand(value.all_input_nodes[0], 1.0, moves)
            is_cast = value.target is aten._to_copy.default and dtype_of(value) in (torch.float32, *_HALF)
            if not (value.target in MOVES or (is_cast and dtype_of(value.args[0]) in (torch.float32, *_HALF))):
                return None
            if not is_cast:
                moves.insert(0, value)
            value = value.args[0]
        return None

    def _unscaled(self, operand: _Operand) -> Node:
        """The operand dequantized by scale 1."""
        value = self._unit(operand.integers)
        for move in operand.moves:
            value = self._call(move.target, value, *move.args[1:], **move.kwargs)
        return value

    # nodes

    def _unit(self, integers: Node) -> Node:
        dtype = dtype_of(integers)
        limits = (-128, 127) if dtype is torch.int8 else (-448, 448)
        operator_of = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        return self._call(operator_of, integers, 1.0, 0, *limits, dtype)

    def _cast(self, value: Node, dtype: torch.dtype) -> Node:
        return value if dtype_of(value) is dtype else self._call(aten._to_copy.default, value, dtype=dtype)

    def _replace(self, node: Node, made: Node) -> None:
        wanted = dtype_of(node)
        assert wanted is not None
        node.replace_all_uses_with(self._cast(made, wanted))

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node; its metadata is computed in the fake mode of its arguments."""
        made = self._graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        made.meta["val"] = target(*values[0], **values[1])
        return made


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    """Integers, moved by `moves` in order, times `scale`: a number, a scalar tensor, or scales. `by_rows`: one for each row. `axis`: one for
    each channel of this dimension."""

    integers: Node
    scale: Any
    moves: Sequence[Node]
    axis: int | None = None
    by_rows: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        return dtype_of(self.integers)

    def rows(self, dims: int, is_convolution: bool) -> tuple[Any, Sequence[int]] | None:
        """The scale of a left operand, and its shape for a product of `dims` dimensions; None if the scale cannot be factored out."""
        if self._is_one:
            return self.scale, ()
        # Moves may change all dimensions but the last one, over which the product sums.
        keeps_rows = all(_keeps_last(each) for each in self.moves)
        if self.by_rows and keeps_rows and dims == 2 and not is_convolution:
            return self.scale, (-1, 1)
        return None

    def columns(self, dims: int, is_convolution: bool) -> tuple[Any, Sequence[int]] | None:
        """The scale of a right operand, whose channels are those of the result; otherwise as `rows`."""
        if self._is_one:
            return self.scale, ()
        if self.axis is None:
            return None
        axis = self.axis
        for move in self.moves:
            if move.target is not aten.permute.default:
                return None
            axis = [int(d) for d in move.args[1]].index(axis)  # type: ignore[union-attr, arg-type]
        if is_convolution:
            return (self.scale, (1, -1, *[1] * (dims - 2))) if axis == 0 else None
        return (self.scale, (*[1] * (dims - 1), -1)) if axis == 1 and dims == 2 else None

    @property
    def _is_one(self) -> bool:
        return self.axis is None and not self.by_rows


_HALF = (torch.float16, torch.bfloat16)
# Positions of a product's operands, and of its bias, among the arguments.
_OPERANDS: Mapping[object, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.bmm.default: (0, 1),
    aten.convolution.default: (0, 1),
}
_BIASES = {aten.addmm.default: 0, aten.convolution.default: 2}


def _is_plain(node: Node) -> bool:
    """True if a product has no beta and alpha, or a convolution is neither transposed nor grouped."""
    if node.target is aten.convolution.default:
        return not node.args[6] and bool(node.args[8] == 1)
    return not node.kwargs and len(node.args) <= 3  # beta and alpha would follow


def _widens(node: Node) -> bool:
    return node.target is aten._to_copy.default and dtype_of(node.args[0]) in NARROW


def _keeps_last(move: Node) -> bool:
    before, after = move.args[0].meta["val"], move.meta["val"]  # type: ignore[union-attr]
    views = (aten._reshape_copy.default, aten.view.default, aten.reshape.default, aten.clone.default)
    return move.target in views and bool(before.shape[-1] == after.shape[-1])
