"""A segment taken out of a graph is a region that runs alone."""

from __future__ import annotations

import torch

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.partition.extract import extract


def test_a_region_computes_its_part_of_the_graph() -> None:
    """Inputs are in the order of their first use, outputs those that others read, in graph order; marks of the operators stay."""
    x, y = torch.randn(3), torch.randn(3)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = torch.sin(x)
        total = y + before
        return torch.exp(total) * torch.cos(total)

    gm = trace(function, x, y)
    nodes = [node for node in gm.graph.nodes if str(node.target) in ("aten.add.Tensor", "aten.exp.default")]
    nodes[0].meta["precision"] = "bfloat16"
    segment = extract("r0", nodes, "tvm", CPU, gm, frozenset())
    region = segment.region
    total = y + x.sin()
    assert segment.outputs == region.node_names == ("add", "exp")
    assert [value.name for value in region.inputs] == [*segment.inputs] == [n.name for n in nodes[0].all_input_nodes]
    values = {"sin": x.sin(), "y_1": y}
    torch.testing.assert_close(region.eager([values[name] for name in segment.inputs]), [total, total.exp()])
    assert next(n for n in region.graph_module.graph.nodes if n.name == "add").meta["precision"] == "bfloat16"
