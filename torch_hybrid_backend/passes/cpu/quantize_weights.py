"""Weights of linear layers and embeddings in 8 or 4 bits; what is computed stays as written, but that kernels may round the activations that
they multiply.

    mm(x, w)               ->   q = quantize(rows of w^T, scale); mm(x, dequantize(q, scale)^T)         q int8
    embedding(table, ids)  ->   q = quantize(table, scale); embedding(dequantize(q, scale), ids)        the rows of ids alone are dequantized

`passes.hoist` computes q and scale of the parameter, and anew when it changes; never the dequantized form, which kernels unpack where they
multiply: a product of few rows takes as long as its weight comes from memory. Kernels may round activations to 8 bits of the largest of up to
64 neighbours, as ggml and OpenVINO do, or to as many as `ctx.weights.activation_bits` says (`core.precision.ROW_BITS`). Unless
`ctx.weights` says otherwise, the weight is symmetric:

    int8-weights   a scale per output channel: the largest magnitude is 127
    int4-weights   a scale per 32 neighbours along k: what has the largest magnitude is -8, so that all 16 values are used (a scale is negative
                   where that is positive); of its neighbours those beyond 7.5 of the other sign are rounded to 7

`ctx.weights.group_size` gives either a scale for so many neighbours. Such scales are bfloat16, those of whole channels float32. With
`ctx.weights.zero_points` the integers of a group span from its least value to its largest, and one of them stands for 0.

Both are (N, K) int8, of 4 bits those between -8 and 7, in torch.ao's own operators: engines pack them. A weight of a half type is widened
first, and what is dequantized is rounded to it again, which kernels leave out. An embedding shares the integers of a layer that its table is
tied to. A table that something else reads too stays as it is: the integers would only be added to it.

Sources: Dettmers et al., "LLM.int8()", 2022 (scales per channel); Frantar et al., "GPTQ", 2022 (groups); Jacob et al., CVPR
2018 (zero points); ggml's formats Q4_0 and Q8_0, 2023 (-8; rows of 8 bits).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.limits import LEAST_QUANTIZED_ELEMENTS
from torch_hybrid_backend.core.precision import ROW_BITS
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.graph.quantization import WEIGHTS
from torch_hybrid_backend.graph.quantized import PRODUCTS, all_readers
from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert
from torch_hybrid_backend.torch_private import quantized_operators

aten = torch.ops.aten

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BITS = {"int8-weights": 8, "int4-weights": 4}
GROUP = 32  # of 4 bits, where nothing else is asked for
_TINY = torch.finfo(torch.float32).tiny
_UP = 1 + 2**-9 + 2**-17  # half a step of bfloat16 and a little: what is rounded to nearest behind it is rounded up


def quantize_weights(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Quantize the constant weights of linear layers and embeddings, as `ctx.precision` says; True if there were any.

    What reads them carries `meta["precision"]`, "int8" or "int4", and the mark `ROW_BITS`. Layers that stay as written, for another reason than
    `ctx.as_written`, are in `gm.meta["as_written"]`: name -> why.
    """
    bits = _BITS.get(ctx.precision)
    if bits is None or has_mutation(gm):
        return False
    constant = ctx.constant_nodes(gm)
    group = ctx.weights.group_size or (GROUP if bits == 4 else None)
    left: dict[str, Refused] = {}
    made: dict[tuple[Node, bool], Node] = {}
    layers = {node: layer for node in gm.graph.nodes if (layer := _layer(node, ctx, constant)) is not None}
    weights = [(node, *layer, _refusal(layer[1].meta["val"], group, layer[2])) for node, layer in layers.items()]
    quantizable = {node for node, *_, refused in weights if refused is None}
    tables = {
        weight
        for node, _, weight, _, _ in weights
        if node.target is aten.embedding.default
        and all_readers(weight, lambda reader, value: reader in quantizable and layers[reader][1] is value)
    }
    for node, position, weight, has_rows, refused in weights:
        if node.target is aten.embedding.default and weight not in tables:
            continue
        if refused is not None:
            left[node.name] = refused
            continue
        how = rows, turned = _rows(weight, has_rows)
        if how not in made:
            quantized_operators()  # the operators exist from here on
            whole = insert(node, aten.permute.default, rows, [1, 0]) if turned else rows
            dtype = whole.meta["val"].dtype
            whole = _widened(node, whole)
            if group is None and not ctx.weights.zero_points:
                made[how] = _by_channel(node, whole)
            else:
                made[how] = _by_group(node, whole, bits, group, has_zeros=ctx.weights.zero_points)
            if dtype != torch.float32:
                made[how] = insert(node, aten._to_copy.default, made[how], dtype=dtype)
        dequantized = made[how] if has_rows else insert(node, aten.permute.default, made[how], [1, 0])
        node.update_arg(position, dequantized)
        node.meta["precision"] = f"int{bits}"
        if node.target in PRODUCTS:
            node.meta[ROW_BITS] = ctx.weights.activation_bits
    gm.meta["as_written"] = {**gm.meta.get("as_written", {}), **left}
    return bool(made)


def _layer(node: Node, ctx: PassContext, constant: Set[Node]) -> tuple[int, Node, bool] | None:
    """The position of the constant weight that a node reads, the weight, and True if it is (N, K) and not (K, N); None for no such layer."""
    if not ctx.may_rewrite(node) or node.name in ctx.as_written:
        return None
    if node.target is aten.embedding.default:
        position, given, has_rows = 0, node.args[1], True
    elif node.target in PRODUCTS:
        position, has_rows = PRODUCTS[node.target], node.target is aten.linear.default
        given = node.args[position - 1]
    else:
        return None
    weight: Any = node.args[position]
    return (position, weight, has_rows) if weight in constant and given not in constant else None


def _refusal(weight: torch.Tensor, group: int | None, has_rows: bool) -> Refused | None:
    """The reason why a weight stays as it is, or None."""
    if weight.dim() != 2 or weight.dtype not in _DTYPES:
        return Refused(
            Reason.UNSUPPORTED, f"weights of dtype {weight.dtype} and {weight.dim()} dimensions are not quantized"
        )
    if weight.numel() < LEAST_QUANTIZED_ELEMENTS:
        return Refused(Reason.SLOWER, f"the weight has {weight.numel()} elements: reading it is not what takes time")
    k = weight.shape[1 if has_rows else 0]
    if group is not None and k % group:
        return Refused(Reason.UNSUPPORTED, f"the {k} inputs of the layer are no whole groups of {group}")
    return None


def _rows(weight: Node, has_rows: bool) -> tuple[Node, bool]:
    """The node that holds the weight's rows, one for each output channel; and True if they are its columns."""
    if has_rows:
        return weight, False
    if weight.target is aten.t.default or (weight.target is aten.permute.default and list(weight.args[1]) == [1, 0]):  # type: ignore[arg-type]
        base: Any = weight.args[0]
        return base, False
    return weight, True


def _by_channel(before: Node, w: Node) -> Node:
    """w (N, K) by way of integers of 8 bits with a scale for each row: dequantized.

    As `graph.quantization.weight`, but without zero points to dequantize by: their fill would stay in every call.
    """
    quantized = torch.ops.quantized_decomposed
    scale = _symmetric_bytes(before, w)
    how = (0, *WEIGHTS)
    q = insert(before, quantized.quantize_per_channel.default, w, scale, _zeros(before, scale), *how)
    return insert(before, quantized.dequantize_per_channel.default, q, scale, None, *how)


def _by_group(before: Node, w: Node, bits: int, group: int | None, *, has_zeros: bool) -> Node:
    """w (N, K) by way of integers of 8 or 4 bits with a scale for `group` neighbours (None: a row), and a zero point: dequantized.

    Scales of groups are bfloat16, rounded up: their bytes are what calls wait for, too. Integers are made by the scale as it is kept.
    """
    quantized = torch.ops.quantized_decomposed
    n, k = w.meta["val"].shape
    is_kept_in_half = group is not None
    group = k if group is None else group
    if not w.meta["val"].is_contiguous():
        w = insert(before, aten.clone.default, w, memory_format=torch.contiguous_format)
    groups = insert(before, aten.view.default, w, [n * k // group, group])
    low, high = (-8, 7) if bits == 4 else (-128, 127)
    if has_zeros:
        scale = _asymmetric(before, groups, high - low)
    elif bits == 4:
        scale = _symmetric_nibbles(before, groups)
    else:
        scale, low = _symmetric_bytes(before, groups), WEIGHTS[0]
    kept = _rounded_up(before, scale) if is_kept_in_half else scale
    scale = _widened(before, kept)
    zero = _zero_points(before, groups, scale, low, high) if has_zeros else None
    # By groups as channels: the operator for groups refuses NaN.
    points = _zeros(before, scale) if zero is None else zero
    q = insert(before, quantized.quantize_per_channel.default, groups, scale, points, 0, low, high, torch.int8)
    form = [n, k // group]
    q, kept = insert(before, aten.view.default, q, [n, k]), insert(before, aten.view.default, kept, form)
    if zero is not None:
        zero = insert(before, aten.view.default, zero, form)
    how = (low, high, torch.int8, group, torch.float32)
    return insert(before, quantized.dequantize_per_channel_group.default, q, _widened(before, kept), zero, *how)


def _rounded_up(before: Node, scale: Node) -> Node:
    """A scale as bfloat16 of no smaller magnitude, by which what has the largest one is not clamped."""
    return insert(before, aten._to_copy.default, insert(before, aten.mul.Tensor, scale, _UP), dtype=torch.bfloat16)


def _widened(before: Node, value: Node) -> Node:
    """A value as float32."""
    if value.meta["val"].dtype == torch.float32:
        return value
    return insert(before, aten._to_copy.default, value, dtype=torch.float32)


def _symmetric_bytes(before: Node, rows: Node) -> Node:
    """The scale of each row, by which its largest magnitude is 127."""
    largest = insert(before, aten.amax.default, insert(before, aten.abs.default, rows), [1])
    return insert(before, aten.clamp_min.default, insert(before, aten.div.Tensor, largest, float(WEIGHTS[1])), _TINY)


def _symmetric_nibbles(before: Node, rows: Node) -> Node:
    """The scale of each row, by which what has the largest magnitude is -8."""
    low, high = insert(before, aten.amin.default, rows, [1]), insert(before, aten.amax.default, rows, [1])
    is_low = insert(before, aten.gt.Tensor, insert(before, aten.neg.default, low), high)
    extreme = insert(before, aten.div.Tensor, insert(before, aten.where.self, is_low, low, high), -8.0)
    # A NaN passes.
    is_none = insert(before, aten.lt.Scalar, insert(before, aten.abs.default, extreme), _TINY)
    return insert(before, aten.where.ScalarSelf, is_none, _TINY, extreme)


def _asymmetric(before: Node, rows: Node, steps: int) -> Node:
    """The scale of each row, by which its values, and 0, lie within so many steps."""
    most = insert(before, aten.clamp_min.default, insert(before, aten.amax.default, rows, [1]), 0.0)
    span = insert(before, aten.sub.Tensor, most, _least(before, rows))
    return insert(before, aten.clamp_min.default, insert(before, aten.div.Tensor, span, float(steps)), _TINY)


def _zero_points(before: Node, rows: Node, scale: Node, low: int, high: int) -> Node:
    """The zero point of each row, by which its least value, or 0, is `low`."""
    steps = insert(before, aten.round.default, insert(before, aten.div.Tensor, _least(before, rows), scale))
    zero = insert(before, aten.clamp.default, insert(before, aten.rsub.Scalar, steps, float(low)), low, high)
    # Of what is not finite, 0: the scale makes the row NaN then.
    finite = insert(before, aten.nan_to_num.default, zero, 0.0)
    return insert(before, aten._to_copy.default, finite, dtype=torch.int32)


def _least(before: Node, rows: Node) -> Node:
    """The least value of each row, or 0."""
    return insert(before, aten.clamp_max.default, insert(before, aten.amin.default, rows, [1]), 0.0)


def _zeros(before: Node, scale: Node) -> Node:
    return insert(before, aten.full_like.default, scale, 0, dtype=torch.int32)
