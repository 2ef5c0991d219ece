"""Contiguous copies of computed constants, in the order in which calls read them."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.graph.schema import is_view
from torch_hybrid_backend.graph.values import has_mutation, storage_root
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import insert, same_spec
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten
Node = torch.fx.Node


def contiguous_tables(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Copy transposed views of values that depend on parameters and constants alone, if only elementwise operators read them.

    T5's position bias consists of rows of a (buckets, heads) table, viewed as (1, heads, queries, keys). Without the copy each element lies in
    another row. The copy is a constant too, and is made once (see `passes.hoist`).

    These are left alone: views of parameters themselves, as a weight is not copied; values that are not static or exceed
    `ctx.fold_limit_bytes`; values whose strides would show in an output or a view.
    """
    if has_mutation(gm):
        return False
    constants = ctx.constant_nodes(gm)
    changed = False
    for node in [n for n in gm.graph.nodes if n in constants and _is_transposed(n, ctx)]:
        readers = [user for user in node.users if user not in constants]
        if not readers:
            continue
        copy = insert(node.next, aten.clone.default, node, origin=node, memory_format=torch.contiguous_format)
        values = _strides_after(readers, node, copy)
        if values is None:
            gm.graph.erase_node(copy)
            continue
        for reader in readers:
            reader.replace_input_with(node, copy)
        for affected, value in values.items():
            affected.meta["val"] = value
        changed = True
    return changed


def _is_transposed(node: Node, ctx: PassContext) -> bool:
    """True if the node is a view of a computed or lifted tensor whose dimensions are not in memory order."""
    value = node.meta.get("val")
    if not is_view(node) or not isinstance(value, torch.Tensor) or storage_root(node).op == "placeholder":
        return False
    if not ctx.may_rewrite(node):
        return False
    if not TensorSpec.of(value).is_static:
        return False
    steps = [step for size, step in zip(value.shape, value.stride(), strict=True) if size != 1]
    return (
        0 not in steps
        and steps != sorted(steps, reverse=True)
        and value.numel() * value.itemsize <= ctx.fold_limit_bytes
    )


def _strides_after(readers: list[Node], old: Node, new: Node) -> dict[Node, Any] | None:
    """Fake values of all nodes whose strides change when `readers` read `new` instead of `old`; None if the change would show elsewhere."""
    values: dict[Node, Any] = {}
    pending = list(readers)
    while pending:
        node = min(pending)
        pending.remove(node)
        if not _is_elementwise(node):
            return None

        def value_of(argument: Node) -> Any:
            return new.meta["val"] if argument is old else values.get(argument, argument.meta["val"])

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        with new.meta["val"].fake_mode:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if not same_spec(value, node.meta["val"]):
            values[node] = value
            pending.extend(user for user in node.users if user not in pending)
    return values


def _is_elementwise(node: Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or is_view(node):
        return False
    return torch.Tag.pointwise in target.tags or target is aten.clone.default
