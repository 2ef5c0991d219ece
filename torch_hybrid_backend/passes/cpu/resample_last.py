"""1x1 convolutions before resampling instead of after it. They commute: resampling acts on pixels, and 1x1 convolutions act on channels.

    conv1x1(cat(a, up(b)))   ->   conv1x1(a, W[:, :n]) + up(conv1x1(b, W[:, n:]))

The multiply-adds of each resampled part shrink by the factor by which its pixels grow (16 for a side 4 times as long), and the concatenation
disappears. The decoders of SegFormer and of feature pyramids end so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, same_spec
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten
Node = torch.fx.Node

# Operators that weight pixels with weights that sum to 1 and are equal for all channels. Their first argument is the image.
_RESAMPLING = frozenset(
    (
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d.vec,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d.vec,
    )
)
# Stride, padding, dilation, transposed, output padding and groups of a 1x1 convolution.
_ONE_PIXEL = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
# If images grow less than this factor, the additions of the parts cost more than is saved.
MIN_GROWTH = 2


def resample_last(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Rewrite 1x1 convolutions with constant weights that are the only readers of resampled images, alone or concatenated.

    A convolution is rewritten only if no more channels are resampled than before, sizes are static, and the dtype is float32 or float64: a half
    type would be rounded once more.
    """
    if has_mutation(gm) or not ctx.constants:
        return False
    constant = ctx.constant_nodes(gm)
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    changed = [_rewrite(gm, node) for node in convolutions if ctx.may_rewrite(node) and _is_candidate(node, constant)]
    return any(changed)


def _is_candidate(node: Node, constant: set[Node]) -> bool:
    x, weight, bias, *geometry = node.args
    values = [argument.meta["val"] for argument in node.all_input_nodes]
    if not all(isinstance(value, torch.Tensor) for value in values):  # padding, say, that is known only at run time
        return False
    plain = all(v.dim() in (1, 4) and v.dtype in (torch.float32, torch.float64) for v in values)
    known = all(isinstance(size, int) for v in values for size in v.shape)
    if not plain or not known or weight not in constant or (bias is not None and bias not in constant) or x in constant:
        return False
    return tuple(geometry) == _ONE_PIXEL and tuple(weight.meta["val"].shape[2:]) == (1, 1)  # type: ignore[union-attr]


def _parts(x: Node) -> list[Node]:
    """The parts of `x` if it is a concatenation along channels, otherwise `x` itself."""
    if x.target is not aten.cat.default or len(x.users) != 1 or not isinstance(x.args[0], list | tuple):
        return [x]
    dimension = x.args[1] if len(x.args) > 1 else 0
    return [part for part in x.args[0] if isinstance(part, Node)] if dimension in (1, -3) else [x]


def _is_resampled(part: Node, channels: int) -> bool:
    """True if a part had better be resampled after the convolution to `channels` channels."""
    if part.target not in _RESAMPLING or len(part.users) != 1:
        return False
    image, result = part.args[0].meta["val"], part.meta["val"]  # type: ignore[union-attr]
    return bool(result.numel() >= MIN_GROWTH * image.numel() > 0 and channels <= image.shape[1])


def _rewrite(gm: torch.fx.GraphModule, node: Node) -> bool:
    x, weight, bias, *geometry = node.args
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    channels = weight.meta["val"].shape[0]
    parts = _parts(x)
    if not any(_is_resampled(part, channels) for part in parts):
        return False
    before = set(gm.graph.nodes)
    total: Node | None = None
    start = 0
    for is_resampled, run in groupby(parts, lambda part: _is_resampled(part, channels)):
        together = list(run)
        for group in [[part] for part in together] if is_resampled else [together]:
            end = start + sum(part.meta["val"].shape[1] for part in group)
            part_weight = weight if len(parts) == 1 else _columns(node, weight, start, end)
            # The bias is added once. Resampling does not change it, as its weights sum to 1.
            term = _term(node, group, is_resampled, part_weight, bias if total is None else None, geometry)
            total = term if total is None else insert(node, aten.add.Tensor, total, term)
            start = end
    assert total is not None
    if not same_spec(total.meta["val"], node.meta["val"]):
        for new in reversed([n for n in gm.graph.nodes if n not in before]):
            gm.graph.erase_node(new)
        return False
    node.replace_all_uses_with(total)
    for old in dict.fromkeys((node, x, *parts)):
        if not old.users and old.op == "call_function":
            gm.graph.erase_node(old)
    return True


def _columns(node: Node, weight: Node, start: int, end: int) -> Node:
    columns = insert(node, aten.slice.Tensor, weight, 1, start, end)
    return insert(node, aten.clone.default, columns, memory_format=torch.contiguous_format)


def _term(
    node: Node, group: Sequence[Node], is_resampled: bool, weight: Node, bias: Any, geometry: Sequence[Any]
) -> Node:
    """The convolution of a group of parts, resampled after it if the part was resampled before it."""
    if is_resampled:
        (part,) = group
        projected = insert(node, aten.convolution.default, part.args[0], weight, bias, *geometry)
        assert isinstance(part.target, OpOverload)
        return insert(node, part.target, projected, *part.args[1:], origin=part, **part.kwargs)
    image = group[0] if len(group) == 1 else insert(node, aten.cat.default, list(group), 1)
    return insert(node, aten.convolution.default, image, weight, bias, *geometry)
