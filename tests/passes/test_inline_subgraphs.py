"""Calls of repeated sub-graphs become the bodies."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.passes.inline_subgraphs import inline_subgraphs

aten = torch.ops.aten


def body(fn: Callable[..., object], *examples: torch.Tensor) -> torch.fx.GraphModule:
    """The sub-graph of `fn` on tensors like these, with metadata."""
    return make_fx(fn, tracing_mode="fake")(*examples)


def calls(block: torch.fx.GraphModule, x: torch.Tensor, *weights: torch.Tensor) -> torch.fx.GraphModule:
    """x through `block` once for each weight; takes (x, *weights), returns a tuple of one."""
    given = body(lambda *tensors: tensors, x, *weights).graph.find_nodes(op="placeholder")
    graph = torch.fx.Graph()
    copies = [graph.node_copy(node) for node in given]
    value = copies[0]
    for number, weight in enumerate(copies[1:]):
        attribute = graph.get_attr("block")
        call = graph.call_function(
            torch.ops.higher_order.invoke_subgraph, (attribute, f"block_{number}", value, weight)
        )
        result = block.graph.output_node().args[0][0]
        call.meta["val"] = (result.meta["val"],)
        value = graph.call_function(operator.getitem, (call, 0))
        value.meta["val"] = result.meta["val"]
    graph.output((value,))
    return torch.fx.GraphModule({"block": block}, graph)


def targets(gm: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_calls_become_bodies() -> None:
    """Two calls of one block with different weights: no call is left, values and metadata are right."""
    x, v, w = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4, 4)
    gm = calls(body(lambda x, w: (torch.relu(x @ w) * 2,), x, v), x, v, w)
    expected = gm(x, v, w)
    inline_subgraphs(gm)
    gm.recompile()
    assert targets(gm) == [aten.mm.default, aten.relu.default, aten.mul.Tensor] * 2
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    torch.testing.assert_close(gm(x, v, w), expected, rtol=0, atol=0)


def test_nested_calls() -> None:
    """Blocks inside blocks are inlined too; constants of a block become constants of the graph."""
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    inner = body(lambda x, w: (x @ w + torch.tensor([0.0, 1.0, 2.0, 3.0]),), x, w)
    assert inner.graph.find_nodes(op="get_attr")
    outer = calls(inner, x, w)
    gm = calls(outer, x, w, w)
    expected = gm(x, w, w)
    inline_subgraphs(gm)
    gm.recompile()
    assert torch.ops.higher_order.invoke_subgraph not in targets(gm)
    torch.testing.assert_close(gm(x, w, w), expected, rtol=0, atol=0)


def test_other_shapes_stay_calls() -> None:
    """A call whose operands do not look like the body's inputs stays: the body's metadata would be wrong for it."""
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    gm = calls(body(lambda x, w: (torch.relu(x @ w),), torch.randn(5, 4), w), x, w)
    before = targets(gm)
    inline_subgraphs(gm)
    assert targets(gm) == before


def test_graphs_without_calls_stay() -> None:
    """A graph without anything to inline is left alone."""
    gm = body(lambda x: (torch.relu(x),), torch.randn(3))
    before = str(gm.graph)
    inline_subgraphs(gm)
    assert str(gm.graph) == before
