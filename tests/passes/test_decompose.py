"""Operators taken apart for an engine that does not take them whole."""

from __future__ import annotations

import torch
from torch.fx import Node

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.capture.decompositions import decomposed
from torch_hybrid_backend.passes.decompose import decompose

aten = torch.ops.aten


def _norm(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, mean, _ = aten.native_layer_norm(x, [8], w, None, 1e-5)
    return y.relu(), mean


def _formulas(graph_module: torch.fx.GraphModule) -> dict[Node, torch.fx.GraphModule]:
    found = (
        (node, decomposed(node, frozenset()))
        for node in graph_module.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
    )
    return {node: formula for node, formula in found if formula is not None}


def test_the_parts_compute_what_the_whole_computed() -> None:
    """Each of several results comes from the parts; the other operators stay, and the graph itself is as it was."""
    x, w = torch.randn(3, 8), torch.randn(8)
    whole = trace(_norm, x, w)
    before = [node.name for node in whole.graph.nodes]
    apart, copies = decompose(whole, _formulas(whole))
    targets = {node.target for node in apart.graph.nodes}
    assert aten.native_layer_norm.default not in targets
    assert {aten.var_mean.correction, aten.relu.default} <= targets
    torch.testing.assert_close(apart(x, w), whole(x, w))
    assert [node.name for node in whole.graph.nodes] == before
    assert "native_layer_norm" not in [node.name for node in copies]
    (relu,) = whole.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert copies[relu].target is aten.relu.default
    assert all(node in copies for node in whole.graph.find_nodes(op="placeholder"))


def test_the_parts_tell_their_values_and_where_they_come_from() -> None:
    """A part has `meta["val"]`, and the source line of the operator it stands for."""
    whole = trace(_norm, torch.randn(3, 8), torch.randn(8))
    (norm,) = whole.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default)
    norm.meta["stack_trace"] = 'File "model.py", line 7, in forward\n  y = norm(x)'
    apart, _ = decompose(whole, _formulas(whole))
    (part,) = apart.graph.find_nodes(op="call_function", target=aten.var_mean.correction)
    assert part.meta["stack_trace"] == norm.meta["stack_trace"]
    assert all("val" in node.meta for node in apart.graph.nodes if node.op == "call_function")
