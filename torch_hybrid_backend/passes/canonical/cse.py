"""Common subexpression elimination."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.graph.schema import is_pure
from torch_hybrid_backend.graph.values import has_mutation, returned_roots
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.rewrite import replace


def cse(gm: torch.fx.GraphModule, ctx: PassContext) -> bool:
    """Replace pure nodes with equal operator and arguments by the first of them.

    1, 1.0 and True are different arguments, as they promote differently; so are 0.0 and -0.0. Nothing is merged
    in a graph that mutates, nor if two outputs would then share memory.
    """
    if has_mutation(gm):
        return False
    changed = False
    first: dict[Any, torch.fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not is_pure(node):
            continue
        key = (node.op, node.target, _key(node.args), _key(node.kwargs))
        earlier = first.setdefault(key, node)
        if earlier is node:
            continue
        if not isinstance(node.meta.get("val"), torch.Tensor):
            # Sizes and tuples of tensors have no memory of their own to share. Their getitems are merged one by one.
            if not any(user.op == "output" for user in node.users) and _tuple_members_private(gm, node):
                node.replace_all_uses_with(earlier)
                gm.graph.erase_node(node)
                changed = True
        elif replace(gm, node, earlier):
            changed = True
    return changed


def _tuple_members_private(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """True if no member of a tuple-valued node is returned, directly or through a view (then merging could alias
    outputs)."""
    members = set(node.users)
    return not any(root in members or root is node for root in returned_roots(gm))


def _key(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return ("sequence", *map(_key, argument))
    if isinstance(argument, dict):
        return ("mapping", *((name, _key(value)) for name, value in sorted(argument.items())))
    if isinstance(argument, float):
        return ("float", argument.hex())
    if isinstance(argument, torch.fx.Node):
        return argument
    return (type(argument), argument if argument.__hash__ else id(argument))
