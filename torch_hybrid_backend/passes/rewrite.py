"""Building and replacing nodes with their metadata kept true."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_hybrid_backend.graph.schema import is_view
from torch_hybrid_backend.graph.values import output_nodes, returned_roots, storage_root
from torch_hybrid_backend.torch_private import FakeTensorMode, OpOverload, detect_fake_mode

# Metadata that says where in the user's code a node came from: a rewritten node inherits it. "site" is of `passes.precision.conversion`.
ORIGIN_KEYS = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "original_aten",
    "seq_nr",
    "from_node",
    "site",
)


def fake_value(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], graph: torch.fx.Graph | None = None
) -> Any:
    """Result that `target` would have for the arguments' `meta["val"]`, as fake tensors; of the graph's own mode where no argument has one."""
    fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    mode = detect_fake_mode((fake_args, fake_kwargs))
    if mode is None and graph is not None:
        mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    mode = mode or FakeTensorMode()
    with mode:
        return target(*fake_args, **fake_kwargs)


def insert(
    before: torch.fx.Node,
    target: OpOverload,
    *args: Any,
    origin: torch.fx.Node | None = None,
    **kwargs: Any,
) -> torch.fx.Node:
    """A new operator in front of `before`, with `meta["val"]`; its source line is `origin`'s (default: `before`'s)."""
    graph = before.graph
    value = fake_value(target, args, kwargs, graph)
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    source = origin or before
    node.meta = {key: source.meta[key] for key in ORIGIN_KEYS if key in source.meta}
    node.meta["val"] = value
    return node


def same_dim(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """True if two sizes are equal for certain, without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def same_dims(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(same_dim(x, y) for x, y in zip(a, b, strict=True))


def same_spec(a: Any, b: Any) -> bool:
    """True if two values have equal dtype, device, shape and strides (and neither is a lazily conjugated or negated
    view)."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and same_dims(a.shape, b.shape)
        and same_dims(a.stride(), b.stride())
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
    )


def may_replace(gm: torch.fx.GraphModule, node: torch.fx.Node, by: torch.fx.Node) -> bool:
    """True if `by`, equal in value to `node`, may stand in for it without a difference that the user could see.

    Refused: a change of dtype, shape or strides; one output object where there were two, or an input's object as an
    output; and outputs that come to share memory with each other, or with an input or constant, where they had their
    own.
    """
    if not same_spec(node.meta.get("val"), by.meta.get("val")):
        return False
    returned = set(output_nodes(gm))
    if node in returned and (by in returned or by.op in ("placeholder", "get_attr")):
        return False
    old_root, new_root = storage_root(node), storage_root(by)
    if old_root is new_root or is_view(node):
        # A view has the same root as its base, and `by` is one of its ancestors or a twin.
        return old_root is new_root
    roots = returned_roots(gm)
    return old_root not in roots or (new_root.op == "call_function" and new_root not in roots)


def replace(gm: torch.fx.GraphModule, node: torch.fx.Node, by: torch.fx.Node) -> bool:
    """Let `by` stand in for `node` and drop `node`, if `may_replace` allows; returns whether it did."""
    if not may_replace(gm, node, by):
        return False
    node.replace_all_uses_with(by)
    gm.graph.erase_node(node)
    return True


def replace_by_new(gm: torch.fx.GraphModule, node: torch.fx.Node, by: torch.fx.Node, after: torch.fx.Node) -> bool:
    """`replace` by what was inserted between `after` and `node`; where it may not stand in, all of that is erased."""
    if replace(gm, node, by):
        return True
    while node.prev is not after:
        gm.graph.erase_node(node.prev)
    return False
