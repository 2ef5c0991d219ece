"""Convolutions and linear layers on integers of 8 bits, by the setting `precision` alone: scales of activations are found in every call.

    addmm(b, x, t(w))  ->  addmm(b, dequantize(quantize(x, rows)), t(dequantize(quantize(w, channels))))

`passes.hoist` quantizes weights once, and anew when a parameter changes; the pairs that stay in the call are an integer product to engines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.graph.quantized import is_dequantized
from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.graph.values import has_mutation, storage_root
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.precision.lists import is_on, packets
from torch_hybrid_backend.passes.rewrite import insert, same_dim

aten = torch.ops.aten

_PRECISIONS = ("int8", "int8+bf16")
# Operator -> positions of its input and its weight, and the weight's dimension of output channels.
_LAYERS: dict[object, tuple[int, int, int]] = {
    aten.convolution.default: (0, 1, 0),
    aten.linear.default: (0, 1, 0),
    aten.mm.default: (0, 1, 1),
    aten.addmm.default: (1, 2, 1),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Operators whose results cannot be negative, whatever they are given.
_NEVER_NEGATIVE = packets("relu relu6 sigmoid hardsigmoid abs exp square _softmax")
# The same, where none of their tensors is negative.
_KEEP_SIGNS = packets(
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d mean sum "
    "silu hardswish gelu leaky_relu sqrt maximum cat stack clone _to_copy pixel_shuffle pixel_unshuffle"
)
# The same, where none of their tensors and none of their numbers is: a factor, the divisor of a pooling.
_KEEP_SIGNS_BY_NUMBERS = packets("add mul div pow elu avg_pool2d avg_pool3d")
# The same, where none of their numbers is, whatever their tensor is. Clamps are to be given their lower end.
_BY_NUMBERS = packets("hardtanh clamp clamp_min threshold softplus")
_CLAMPS = packets("hardtanh clamp clamp_min")


def quantize_layers(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Quantize the layers whose weights are constants, as `ctx.precision` says; returns True if there were any.

    Inputs of convolutions get one scale, those of linear layers one for each row; to uint8 where they come from an operator that yields
    nothing negative. Layers that are quantized carry `meta["precision"]`, "int8"; those that stay as written are in `gm.meta["as_written"]`:
    name -> why. A layer that the graph itself quantizes is left alone.
    """
    if ctx.precision not in _PRECISIONS or has_mutation(gm):
        return False
    constant = ctx.constant_nodes(gm)
    left: dict[str, Refused] = {}
    made: dict[Any, Node] = {}  # of activations and weights that several layers read
    changed = False
    for node in list(gm.graph.nodes):
        if node.target not in _LAYERS or not ctx.may_rewrite(node) or node.name in ctx.as_written:
            continue
        x_at, w_at, axis = _LAYERS[node.target]
        x: Any = node.args[x_at]
        w: Any = node.args[w_at]
        if w not in constant or x in constant or is_dequantized(storage_root(x)):
            continue
        refused = _refusal(node, x, w)
        if refused is not None:
            left[node.name] = refused
            continue
        node.update_arg(x_at, _activation(made, node, x))
        node.update_arg(w_at, _weight(made, node, w, axis, ctx.weight_bits))
        node.meta["precision"] = "int8"
        changed = True
    gm.meta["as_written"] = {**gm.meta.get("as_written", {}), **left}
    return changed


def _refusal(node: Node, x: Node, w: Node) -> Refused | None:
    dtypes = {x.meta["val"].dtype, w.meta["val"].dtype}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES}:
        return Refused(
            Reason.UNSUPPORTED, f"values of dtype {' and '.join(sorted(map(str, dtypes)))} are not quantized"
        )
    if any(same_dim(size, 0) for size in x.meta["val"].shape):
        return Refused(Reason.UNSUPPORTED, "a tensor without elements has no largest magnitude")
    if node.target is aten.convolution.default and node.args[6]:
        return Refused(Reason.UNSUPPORTED, "transposed convolutions are not quantized")
    return None


def _once(made: dict[Any, Node], key: Any, make: Callable[[], Node]) -> Node:
    if key not in made:
        made[key] = make()
    return made[key]


def _activation(made: dict[Any, Node], layer: Node, x: Node) -> Node:
    from torch_hybrid_backend.graph import quantization as steps  # imports torch.ao, which graphs as written do without

    apply = functools.partial(insert, layer)
    non_negative = _is_never_negative(x)
    if layer.target is not aten.convolution.default:
        return _once(made, (x, "rows"), lambda: steps.rows_now(apply, x, non_negative=non_negative))
    return _once(made, x, lambda: steps.tensor_now(apply, x, non_negative=non_negative))


def _weight(made: dict[Any, Node], layer: Node, w: Node, axis: int, bits: int) -> Node:
    """Quantize a weight; of a transposed one the parameter, as the parameter lies in memory."""
    from torch_hybrid_backend.graph import quantization as steps

    apply = functools.partial(insert, layer)
    base: Any = w.args[0] if w.target is aten.t.default else None
    if w.target is aten.permute.default and list(w.args[1]) == [1, 0]:  # type: ignore[arg-type]
        base = w.args[0]
    if base is None:
        return _once(made, (w, axis), lambda: steps.weight(apply, w, axis, bits))
    dequantized = _once(made, (base, 1 - axis), lambda: steps.weight(apply, base, 1 - axis, bits))
    return insert(layer, aten.permute.default, dequantized, [1, 0])


def _is_never_negative(x: Node) -> bool:
    """True if the operators that x comes from yield nothing below 0; NaN apart."""
    waiting, seen = [x], set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():  # integers may wrap
            return False
        if _yields_nothing_negative(node):
            continue
        if not _keeps_signs(node):
            return False
        waiting += node.all_input_nodes
    return True


def _yields_nothing_negative(node: Node) -> bool:
    """True if a result cannot be negative, whatever the tensor is that the operator is given."""
    args = node.args
    if is_on(node, _BY_NUMBERS):
        # The upper end of a clamp may be the lower one.
        low = args[1] if len(args) > 1 else node.kwargs.get("min", None if is_on(node, _CLAMPS) else 0)
        return isinstance(low, int | float) and not _has_negative_number(node)
    if node.target is aten.pow.Tensor_Scalar:
        exponent: Any = args[1]
        return isinstance(exponent, int | float) and exponent % 2 == 0
    return is_on(node, _NEVER_NEGATIVE) or (node.target is aten.mul.Tensor and args[0] is args[1])


def _keeps_signs(node: Node) -> bool:
    """True if a result cannot be negative where nothing is that the operator is given."""
    if is_on(node, _KEEP_SIGNS_BY_NUMBERS):
        return not _has_negative_number(node)
    is_same = is_view(node) and node.target is not aten.view.dtype
    is_first = is_item(node) and bool(node.args[1] == 0)  # the maxima of a pooling, not their places
    return is_same or is_first or is_on(node, _KEEP_SIGNS)


def _has_negative_number(node: Node) -> bool:
    return any(isinstance(arg, int | float) and arg < 0 for arg in (*node.args, *node.kwargs.values()))
