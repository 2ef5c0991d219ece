"""Inlining of the bodies of `invoke_subgraph` calls.

`torch.compiler.nested_compile_region` makes the repeated blocks of a model one sub-graph that is traced once and called several times. Calls
would prevent fusion across blocks, packing of weights (each call passes other weights to the same sub-graph), and running without Python. Equal
kernels are compiled once, so inlining costs no compile time.

This is a step before the pipeline, not a pass. The body of a training graph may return a view of an input, saved for its backward. After
inlining the graph shows that these outputs share memory, which they do in the call as well. `verify` would reject this change.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.graph.values import outputs_of
from torch_hybrid_backend.torch_private import HigherOrderOperator

Node = torch.fx.Node


def inline_subgraphs(gm: torch.fx.GraphModule) -> None:
    """Inline every `invoke_subgraph` whose operands look like the body's placeholders (dtype, shape, strides)."""
    calls = [node for node in gm.graph.nodes if _is_call(node)]
    while calls:
        inlined = [_inline(gm, call) for call in calls]
        # Inlined bodies may contain calls, which are in this graph now.
        calls = [node for node in gm.graph.nodes if _is_call(node)] if any(inlined) else []
    gm.graph.lint()


def _is_call(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and str(node.target) == "invoke_subgraph"


def _inline(gm: torch.fx.GraphModule, call: Node) -> bool:
    subgraph, _identifier, *operands = call.args
    assert isinstance(subgraph, Node)
    body = operator.attrgetter(str(subgraph.target))(gm)
    if not isinstance(body, torch.fx.GraphModule) or not _fits(body, operands) or not _takes_items(call, body):
        return False
    values: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                values[node] = gm.graph.get_attr(
                    _adopt(gm, operator.attrgetter(str(node.target))(body), str(node.target))
                )
                values[node].meta = dict(node.meta)
            elif node.op not in ("placeholder", "output"):
                values[node] = gm.graph.node_copy(node, values.__getitem__)
    results = outputs_of(body)
    for item in list(call.users):
        result = results[item.args[1]]  # type: ignore[index]
        item.replace_all_uses_with(values[result])  # type: ignore[index]
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)
    if not subgraph.users:
        gm.graph.erase_node(subgraph)
    return True


def _fits(body: torch.fx.GraphModule, operands: list[Any]) -> bool:
    """True if the operands look like the body's placeholders. With other symbols for sizes the body's metadata would be wrong."""
    placeholders = body.graph.find_nodes(op="placeholder")
    return len(placeholders) == len(operands) and all(
        isinstance(operand, Node) and _looks(placeholder) == _looks(operand)
        for placeholder, operand in zip(placeholders, operands, strict=True)
    )


def _looks(node: Node) -> object:
    value = node.meta.get("val")
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else str(value)


def _takes_items(call: Node, body: torch.fx.GraphModule) -> bool:
    """True if every use of the call picks one of the body's values."""
    results = outputs_of(body)
    return all(
        user.target is operator.getitem and isinstance(user.args[1], int) and isinstance(results[user.args[1]], Node)
        for user in call.users
    )


def _adopt(gm: torch.fx.GraphModule, attribute: object, name: str) -> str:
    """Give `gm` the attribute under an unused name, or under the name that the same object already has. Returns the name."""
    flat = name.replace(".", "_")
    for number in itertools.count():
        candidate = f"{flat}_{number}" if number else flat
        if not hasattr(gm, candidate):
            if isinstance(attribute, torch.Tensor) and not isinstance(attribute, torch.nn.Parameter):
                gm.register_buffer(candidate, attribute, persistent=False)
            else:
                setattr(gm, candidate, attribute)
            return candidate
        if getattr(gm, candidate) is attribute:
            return candidate
    raise AssertionError("counting never ends")
