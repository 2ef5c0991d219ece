"""Merging of matrix products of one input, as the queries, keys and values of attention. Their results are slices of one product.

    q = addmm(bq, x, Wq); k = addmm(bk, x, Wk)   ->   y = addmm(cat(bq, bk), x, cat(Wq, Wk)); q = y[:, :n]; k = y[:, n:]

One kernel starts its threads once and waits once for its first weights, which saves about 10 us per product. That matters if products
are small: one token, or key heads shared by several query heads. The concatenated weights depend on parameters alone: hoisting computes them
outside the call, and they are released after packing.
Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", 2022; here for CPU cores.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.graph.schema import is_view
from torch_hybrid_backend.graph.values import has_mutation, returned_roots
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, same_spec
from torch_hybrid_backend.torch_private import FakeTensorMode, OpOverload, detect_fake_mode

aten = torch.ops.aten
Node = torch.fx.Node

# At 500 GFLOP/s a larger product takes 20 times the 10 us that merging saves. The products of BERT-base (151 million operations at 128 tokens)
# lose more by reading slices than they gain: 54.8 ms instead of 54.0. Those of Llama (50 million) gain: 60.4 instead of 60.8 (2-core Zen 5).
_MAX_FLOPS = 100e6

# Operator -> positions of its input, weight and bias (None: no bias), and the dimension of the weight that holds output columns.
_PRODUCTS: dict[object, tuple[int, int, int | None, int]] = {
    aten.mm.default: (0, 1, None, 1),
    aten.addmm.default: (1, 2, 0, 1),
    aten.linear.default: (0, 1, 2, 0),
}


def merge_siblings(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Merge products of one input with constant weights, if at least one product is small and merging costs nothing elsewhere.

    These are left alone: outputs of the graph, as they would share memory; products whose only reader is elementwise (gate and up of a gated
    MLP), as both are one kernel already and merging would cost a pass over memory; results whose readers would see other strides; products with
    biases that are not one number per column.
    """
    if has_mutation(gm) or not ctx.constants:
        return False
    constant = ctx.constant_nodes(gm)
    returned = returned_roots(gm)
    siblings: dict[tuple[object, ...], list[Node]] = {}
    for node in gm.graph.nodes:
        if node.target not in _PRODUCTS or node in returned or not ctx.may_rewrite(node):
            continue
        if _is_candidate(node, constant):
            x, _, bias = _operands(node)
            siblings.setdefault((node.target, x, bias is None), []).append(node)
    merged = [
        _merge(gm, group) for group in siblings.values() if len(group) > 1 and min(map(_flops, group)) <= _MAX_FLOPS
    ]
    return any(merged)


def _operands(node: Node) -> tuple[Any, Any, Any]:
    x, weight, bias, _ = _PRODUCTS[node.target]
    return node.args[x], node.args[weight], None if bias is None or bias >= len(node.args) else node.args[bias]


def _is_candidate(node: Node, constant: set[Node]) -> bool:
    x, weight, bias = _operands(node)
    if node.kwargs or weight not in constant or x in constant or weight.meta["val"].dim() != 2:
        return False
    columns = weight.meta["val"].shape[_PRODUCTS[node.target][3]]
    if bias is not None and (bias not in constant or tuple(bias.meta["val"].shape) != (columns,)):
        return False
    same = node.meta["val"].dtype == weight.meta["val"].dtype == x.meta["val"].dtype
    return same and (bias is None or bias.meta["val"].dtype == weight.meta["val"].dtype) and not feeds_epilogue(node)


def _flops(product: Node) -> float:
    """Floating-point operations of a product. Sizes known only at run time count with the values at capture."""
    depth = _operands(product)[1].meta["val"].numel() / product.meta["val"].shape[-1]
    rows_and_columns = product.meta["val"].numel()
    if isinstance(rows_and_columns, torch.SymInt):
        rows_and_columns = rows_and_columns.node.hint or 0
    return 2.0 * float(rows_and_columns) * float(depth)


def feeds_epilogue(node: Node) -> bool:
    """True if the node's only reader, directly or through views, is an elementwise operator."""
    readers = list(node.users)
    while len(readers) == 1 and is_view(readers[0]):
        readers = list(readers[0].users)
    target = readers[0].target if len(readers) == 1 else None
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


def _merge(gm: torch.fx.GraphModule, group: Sequence[Node]) -> bool:
    """Replace the group by one product, unless a reader would see a difference. Returns true if it did."""
    first = group[0]
    _, weight_at, bias_at, columns_at = _PRODUCTS[first.target]
    operands = [_operands(node) for node in group]
    for wanted in [*(weight for _, weight, _ in operands), *(bias for *_, bias in operands if bias is not None)]:
        move_before(first, wanted)
    weight = insert(first, aten.cat.default, [weight for _, weight, _ in operands], columns_at)
    arguments, new = list(first.args), [weight]
    arguments[weight_at] = weight
    if operands[0][2] is not None:
        assert bias_at is not None
        arguments[bias_at] = bias = insert(first, aten.cat.default, [bias for *_, bias in operands])
        new.append(bias)
    merged = insert(first, first.target, *arguments, origin=first)  # type: ignore[arg-type]
    parts, start = [], 0
    for node in group:
        end = start + node.meta["val"].shape[-1]
        parts.append(insert(first, aten.slice.Tensor, merged, merged.meta["val"].dim() - 1, start, end, origin=node))
        start = end
    values = values_with(gm, dict(zip(group, (part.meta["val"] for part in parts), strict=True)))
    if values is None:
        for node in reversed([*new, merged, *parts]):
            gm.graph.erase_node(node)
        return False
    for node, part in zip(group, parts, strict=True):
        node.replace_all_uses_with(part)
        gm.graph.erase_node(node)
    for node, value in values.items():
        node.meta["val"] = value
    return True


def move_before(place: Node, node: Node) -> None:
    """Move a constant that is computed after `place`, and the nodes that it depends on, in front of `place`."""
    behind: set[Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if each not in behind and not each < place:
            behind.add(each)
            pending.extend(each.all_input_nodes)
    for each in sorted(behind):
        place.prepend(each)


def values_with(gm: torch.fx.GraphModule, changed: dict[Node, Any]) -> dict[Node, Any] | None:
    """The new `meta["val"]` of views of the `changed` nodes, whose strides change. None if a view is not possible any more, or
    if another operator would return a different form."""
    known = dict(changed)
    for node in gm.graph.nodes:
        if node in changed or not any(argument in known for argument in node.all_input_nodes):
            continue
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: known.get(n, n.meta["val"]))
        try:
            with detect_fake_mode((args, kwargs)) or FakeTensorMode():
                value = node.target(*args, **kwargs)
        except failures(RuntimeError, ValueError):
            return None
        if is_view(node):
            known[node] = value
        elif not _same(value, node.meta["val"]):
            return None
    return {node: value for node, value in known.items() if node not in changed}


def _same(new: Any, old: Any) -> bool:
    if isinstance(new, tuple | list):
        return len(new) == len(old) and all(map(_same, new, old))
    return same_spec(new, old) if isinstance(new, torch.Tensor) else type(new) is type(old) and operator.eq(new, old)
