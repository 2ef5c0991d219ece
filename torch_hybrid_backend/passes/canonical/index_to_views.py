"""Indexing by constants that count up becomes slices and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.canonical.fold_constants import evaluate, input_free
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, may_replace
from torch_hybrid_backend.torch_private import unset_fake_temporarily

aten = torch.ops.aten
Node = torch.fx.Node


def index_to_views(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Replace `index` if every index tensor is constant and either is one number or counts 0 <= start, start + step, ... along one axis.

    mask[zeros(1, 1, 1, 1), arange(128).view(1, 1, 1, 128)] of a (1, 128) mask is mask.view(1, 1, 1, 128). torch.vmap, and with it transformers,
    makes attention masks so. A gather costs several loads and comparisons for each element.

    These are left alone: indices that depend on inputs; axes of more than one element along which no index counts; index tensors whose axes are
    not in the order of the dimensions that they index; indexed dimensions that are not adjacent; sizes that are not static.
    """
    if has_mutation(gm):
        return False
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is aten.index.Tensor]
    if not nodes:
        return False
    constant = input_free(gm, ctx)
    nodes = [n for n in nodes if all(i is None or i in constant for i in n.args[1])]
    values = evaluate(gm, [i for n in nodes for i in n.args[1] if i is not None])
    changed = False
    for node in nodes:
        indices = {d: values[i] for d, i in enumerate(node.args[1]) if i is not None}
        with unset_fake_temporarily():  # AOTAutograd is still tracing
            ranges = _ranges(node.args[0].meta["val"].shape, indices)
        if ranges is not None:
            changed |= _rewrite(gm, node, ranges)
    return changed


def _rewrite(gm: torch.fx.GraphModule, node: Node, ranges: dict[int, range]) -> bool:
    x: Any = node.args[0]
    shape = node.meta["val"].shape
    if not all(isinstance(size, int) for size in shape):
        return False
    made: list[Node] = []
    result = x
    for dim, counted in ranges.items():
        if counted != range(x.meta["val"].shape[dim]):
            made.append(insert(node, aten.slice.Tensor, result, dim, counted.start, counted.stop, counted.step))
            result = made[-1]
    # The shapes are equal, apart from dimensions of one element.
    made.append(insert(node, aten.view.default, result, list(shape)))
    if not may_replace(gm, node, made[-1]):
        made.append(insert(node, aten.clone.default, made[-1], memory_format=torch.contiguous_format))
    if not may_replace(gm, node, made[-1]):
        for unused in reversed(made):
            gm.graph.erase_node(unused)
        return False
    node.replace_all_uses_with(made[-1])
    gm.graph.erase_node(node)
    return True


def _ranges(sizes: Sequence[Any], indices: dict[int, torch.Tensor]) -> dict[int, range] | None:
    """Dimension -> the range that its index tensor counts. None if the indexing is more than slices and a view."""
    dims = sorted(indices)
    if not dims or dims != list(range(dims[0], dims[-1] + 1)):
        return None
    if any(i.dtype not in (torch.int64, torch.int32) or i.numel() == 0 for i in indices.values()):
        return None
    rank = max(i.dim() for i in indices.values())
    ranges: dict[int, range] = {}
    last = -1
    for dim in dims:
        index = indices[dim]
        axes = [axis + rank - index.dim() for axis, size in enumerate(index.shape) if size > 1]
        counted = _range(index.flatten().tolist())
        if len(axes) > 1 or counted is None or not isinstance(sizes[dim], int) or counted[-1] >= sizes[dim]:
            return None
        if axes:
            if axes[0] <= last:
                return None  # the same axis twice is a diagonal, and another order is a permutation
            last = axes[0]
        ranges[dim] = counted
    return ranges


def _range(numbers: list[int]) -> range | None:
    """The numbers as a range that counts upwards from 0 or more; None if they are no such range."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if numbers[0] < 0 or step < 1:
        return None
    counted = range(numbers[0], numbers[-1] + 1, step)
    return counted if list(counted) == numbers else None
