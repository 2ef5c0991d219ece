"""Size arithmetic of a lowered graph, rewritten to operators that have converters: sizes of inputs, sums, products and quotients.

    sym_stride(x, 0)          becomes    mul(sym_size(x, 1), 64)        x: an input of 64 columns and any number of rows, in memory by columns
    sym_sum((a, b, 1))        becomes    add(add(a, b), 1)

Tracing takes a size from the first value that has it, even from a stride.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer, Proxy

from torch_hybrid_backend.core.tensor_spec import dim
from torch_hybrid_backend.sizes.size import Dim, Size, Symbol

aten = torch.ops.aten


def lower_sizes(module: torch.fx.GraphModule) -> None:
    """Rewrite the size arithmetic of a traced graph with metadata, in place. Strides that are no polynomials in input sizes stay."""
    graph = module.graph
    places = {
        str(size.node.expr): (node, position)
        for node in graph.find_nodes(op="placeholder")
        for position, size in enumerate(node.meta["val"].shape)
        if isinstance(size, torch.SymInt)
    }
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target is torch.sym_sum:
                terms = node.args[0] if len(node.args) == 1 else node.args
                made = functools.reduce(operator.add, [_proxy(each) for each in terms])
            elif node.target is aten.sym_stride.int and _is_polynomial(stride := dim(node.meta["val"]), places):
                made = _nodes_of(stride, graph, places)
            else:
                continue
        node.replace_all_uses_with(made.node)
        graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = node.target(*map_arg(node.args, lambda each: each.meta["val"]))
    module.recompile()


Places = Mapping[str, tuple[Node, int]]


def _is_polynomial(size: Dim, places: Places) -> bool:
    """True if a size is a polynomial in sizes of inputs. `places`: the input and dimension of each symbol."""
    if isinstance(size, int):
        return False
    atoms = [atom for monomial in size.terms for atom, _ in monomial]
    return all(isinstance(atom, Symbol) and atom.name in places for atom in atoms)


def _nodes_of(size: Dim, graph: Graph, places: Places) -> Proxy:
    assert isinstance(size, Size)
    products = []
    for monomial, factor in size.terms.items():
        factors: list[Any] = [factor] if factor != 1 or not monomial else []
        for atom, power in monomial:
            factors += [_proxy(graph.call_function(aten.sym_size.int, places[atom.name]))] * power
        products.append(functools.reduce(operator.mul, factors))
    made: Proxy = functools.reduce(operator.add, products)
    return made


def _proxy(value: Any) -> Any:
    """A proxy, whose arithmetic adds nodes to the graph; numbers stay as they are."""
    return Proxy(value, GraphAppendingTracer(value.graph)) if isinstance(value, Node) else value
