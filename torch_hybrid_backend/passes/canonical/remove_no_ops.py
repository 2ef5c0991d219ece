"""Removal of operators that return their input, and merging of chains of views."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.graph.quantized import is_quantize_operator
from torch_hybrid_backend.graph.schema import is_view
from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, replace, replace_by_new, same_dim, same_spec

aten = torch.ops.aten

# Copies. They can be removed if the copy has the strides of the original, and no user can tell the two memories apart.
COPIES = frozenset({aten.clone.default, aten.lift_fresh_copy.default, aten._to_copy.default})
# Views whose result is determined by its shape alone, so that only the last of a chain matters.
RESHAPES = frozenset(
    {aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default}
)
# Dtype -> the wider dtypes that hold all its values.
_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def remove_no_ops(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Remove operators that change nothing, and merge view-of-view and permute-of-permute.

    Removed are casts to the same dtype, or to a wider one and back; copies; empty paddings of quantized values; views that change nothing (same
    shape, full slice, identity permutation); and parts of concatenations without elements.

    A copy stays if its memory format differs from its input's, which is a layout change, or if it keeps an output's memory apart from that of
    an input, a constant or another output.
    """
    if has_mutation(gm):
        return False
    changed = False
    for node in list(gm.graph.nodes):
        if node.target is aten.cat.default:
            changed |= _drop_empty_parts(gm, node)
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], torch.fx.Node):
            continue
        if node.target in COPIES or _pads_nothing(node):
            changed |= replace(gm, node, _before_widening(node.args[0])) or replace(gm, node, node.args[0])
        elif is_view(node):
            changed |= _remove_view(gm, node) or _merge_views(gm, node) or _plain_view(gm, node)
    return changed


def _pads_nothing(node: torch.fx.Node) -> bool:
    """True if the padding is empty and its result is only quantized. Another operator may quantize the unpadded tensor with the same
    parameters."""
    pad: Any = node.args[1] if node.target is aten.constant_pad_nd.default else (None,)
    is_whole = all(isinstance(size, int) and size == 0 for size in pad)
    return is_whole and all(map(is_quantize_operator, node.users))


def _before_widening(value: torch.fx.Node) -> torch.fx.Node:
    """The input of a cast to a wider dtype, which a cast back restores bit by bit; `value` itself if it is no such cast."""
    if value.target is not aten._to_copy.default:
        return value
    narrow: Any = value.args[0]
    return narrow if value.meta["val"].dtype in _WIDER.get(narrow.meta["val"].dtype, ()) else value


def _drop_empty_parts(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Drop empty parts of a concatenation. Rotary embeddings of whole heads (Phi-3) join the rotated part with an empty one."""
    parts: Any = node.args[0]
    nonempty = [part for part in parts if not same_dim(part.meta["val"].numel(), 0)]
    if len(nonempty) in (0, len(parts)) or any(part.meta["val"].dtype != node.meta["val"].dtype for part in parts):
        return False
    if len(nonempty) == 1 and replace(gm, node, nonempty[0]):
        return True
    before = node.prev
    shorter = insert(node, aten.cat.default, nonempty, *node.args[1:], origin=node, **node.kwargs)
    return replace_by_new(gm, node, shorter, before)


def _remove_view(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    base: Any = node.args[0]
    before, after = base.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if not same_spec(before, after) or not same_dim(before.storage_offset(), after.storage_offset()):
        return False
    return replace(gm, node, base)


def _merge_views(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    inner: Any = node.args[0]
    if node.target in RESHAPES and inner.target in RESHAPES:
        target, rest = aten.view.default, (_shape_argument(node),)
        if rest[0] is None:
            return False
    elif node.target is aten.permute.default and inner.target is aten.permute.default:
        rank = len(inner.args[1])
        target, rest = aten.permute.default, ([inner.args[1][d] % rank for d in node.args[1]],)  # type: ignore[union-attr]
    else:
        return False
    source: Any = inner.args[0]
    if not TensorSpec.of(source.meta["val"]).is_static:
        return False  # inserting the view could add guards
    try:
        merged = insert(node, target, source, *rest)
    except failures(RuntimeError, ValueError):
        return False  # the merged operator would be no view of `source`, though each of the two is a view of its input
    if same_spec(merged.meta["val"], node.meta["val"]):
        node.replace_all_uses_with(merged)
        gm.graph.erase_node(node)
        if not inner.users:
            gm.graph.erase_node(inner)
        return True
    gm.graph.erase_node(merged)
    return False


def _plain_view(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Replace `as_strided` that only reshapes a contiguous tensor by `view`, which every engine supports."""
    base: Any = node.args[0]
    if node.target is not aten.as_strided.default or not all(isinstance(n, int) for n in node.meta["val"].shape):
        return False
    before, after = base.meta["val"], node.meta["val"]
    static = all(isinstance(n, int) for n in before.shape)
    if not static or not (before.is_contiguous() and after.is_contiguous()) or before.numel() != after.numel():
        return False
    if not same_dim(before.storage_offset(), after.storage_offset()):
        return False
    view = insert(node, aten.view.default, base, list(after.shape))
    if not same_spec(view.meta["val"], after):
        gm.graph.erase_node(view)
        return False
    node.replace_all_uses_with(view)
    gm.graph.erase_node(node)
    return True


def _shape_argument(node: torch.fx.Node) -> object:
    """The node's result shape as an argument of `view`; None if a symbolic size has no node."""
    if node.target is aten.view.default:
        return node.args[1]
    shape = list(node.meta["val"].shape)
    return shape if all(isinstance(size, int) for size in shape) else None
