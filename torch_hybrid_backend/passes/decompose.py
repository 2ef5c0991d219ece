"""Decomposition of operators that were kept whole for one engine, so that another engine can take their parts.

This is no pass of the pipeline: the operators to decompose depend on the engines that refuse them (`partition.partitionings`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.passes.rewrite import ORIGIN_KEYS


def decompose(
    graph_module: torch.fx.GraphModule, formulas: Mapping[Node, torch.fx.GraphModule]
) -> tuple[torch.fx.GraphModule, dict[Node, Node]]:
    """A copy of the graph with each key of `formulas` decomposed, and the copies of the other nodes (old -> new). The graph is not changed.

    A formula takes its operator's input nodes in the order of `all_input_nodes`. It returns the operator's results in order, in the same form.
    An operator of several results must be read through `getitem` only.
    """
    graph = torch.fx.Graph()
    new: dict[Node, Node] = {}
    copies: dict[Node, Node] = {}
    results: dict[Node, tuple[Node | None, ...]] = {}
    for node in graph_module.graph.nodes:
        if node in formulas:
            results[node] = _inlined(graph, node, formulas[node], new)
            if not isinstance(node.meta["val"], list | tuple):
                (only,) = results[node]
                assert only is not None
                new[node] = only
        elif node.target is operator.getitem and node.args[0] in results:
            result = results[node.args[0]][node.args[1]]
            assert result is not None
            new[node] = result
        else:
            new[node] = copies[node] = graph.node_copy(node, new.__getitem__)
    graph.lint()
    return torch.fx.GraphModule(graph_module, graph), copies


def _inlined(
    graph: torch.fx.Graph, node: Node, formula: torch.fx.GraphModule, new: Mapping[Node, Node]
) -> tuple[Node | None, ...]:
    """Append the formula's operators to `graph`. Returns its results, None for results that the operator does not have either."""
    inner = dict(
        zip(formula.graph.find_nodes(op="placeholder"), map(new.__getitem__, node.all_input_nodes), strict=True)
    )
    origin = {key: node.meta[key] for key in ORIGIN_KEYS if key in node.meta}
    for part in formula.graph.nodes:
        if part.op == "output":
            returned = part.args[0]
            listed = returned if isinstance(returned, list | tuple) else (returned,)
            return tuple(inner[result] if isinstance(result, Node) else None for result in listed)
        if part.op != "placeholder":
            inner[part] = graph.node_copy(part, inner.__getitem__)
            inner[part].meta = {**origin, "val": part.meta["val"]}
    raise ValueError("a graph without an output")
