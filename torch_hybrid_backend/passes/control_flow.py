"""Bodies of control flow: branches of `cond`, conditions and bodies of `while_loop`, steps of `scan` and `map`.

Eager runs the operators themselves, and calls the bodies with plain tensors. Bodies are functional ATen graphs, as the outer graph is, and are
compiled as graphs of their own. Sub-graphs that their operator maps over a batch are not compiled: those of `associative_scan` and
`flex_attention`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.torch_private import HigherOrderOperator

Node = torch.fx.Node

# Takes the operands as a list, returns the outputs as a list.
Run = Callable[[list[Any]], list[Any]]
# One call site: its bodies, and the operand of each of their placeholders; None for a value that changes from one iteration to the next.
_Site = tuple[tuple[Any, ...], tuple[Any, ...]]


def _cond(_predicate: Any, if_true: Any, if_false: Any, operands: Sequence[Any]) -> _Site:
    return (if_true, if_false), tuple(operands)


def _while_loop(condition: Any, body: Any, carried: Sequence[Any], others: Sequence[Any]) -> _Site:
    return (condition, body), (*(None for _ in carried), *others)


def _scan(step: Any, carried: Sequence[Any], scanned: Sequence[Any], others: Sequence[Any]) -> _Site:
    return (step,), (*(None for _ in (*carried, *scanned)), *others)


def _map(body: Any, mapped: Sequence[Any], others: Sequence[Any]) -> _Site:
    return (body,), (*(None for _ in mapped), *others)


def _invoke_subgraph(body: Any, _identifier: Any, *operands: Any) -> _Site:
    return (body,), operands


_OPERATORS: Mapping[str, Callable[..., _Site]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "invoke_subgraph": _invoke_subgraph,  # those that inline_subgraphs could not inline
}


class CompiledBody(torch.nn.Module):
    """A compiled body in place of the sub-graph from which it was compiled. Its inputs and outputs are those of the sub-graph."""

    def __init__(self, run: Run, returns: object) -> None:
        super().__init__()
        self._run = run
        self._pack: Callable[[list[Any]], Any] = (
            list if isinstance(returns, list) else tuple if isinstance(returns, tuple) else operator.itemgetter(0)
        )

    def forward(self, *operands: Any) -> Any:
        return self._pack(self._run(list(operands)))


def compile_bodies(captured: CapturedGraph, compile_body: Callable[[str, CapturedGraph], Run]) -> None:
    """Replace each body in the captured graph by the result of `compile_body`.

    `compile_body` takes the body's name, and the body as a captured graph of the outer graph's kind. Parameters that the outer graph passes to
    a body become the body's static inputs, unless two calls pass different parameters.
    """
    gm = captured.graph_module
    for name, operands in _bodies(gm).items():
        body = operator.attrgetter(name)(gm)
        placeholders = [node.name for node in body.graph.find_nodes(op="placeholder")]
        if len(placeholders) != len(operands):
            continue
        static = (
            placeholder
            for placeholder, operand in zip(placeholders, operands, strict=True)
            if isinstance(operand, Node) and operand.op == "placeholder" and operand.name in captured.static_inputs
        )
        run = compile_body(name, CapturedGraph(body, captured.kind, frozenset(static)))
        setattr(gm, name, CompiledBody(run, body.graph.output_node().args[0]))


def _bodies(gm: torch.fx.GraphModule) -> dict[str, tuple[Any, ...]]:
    """Name of a sub-graph that only control flow calls -> the operand of each of its placeholders, if all calls pass the same; else None."""
    sites: dict[str, tuple[Any, ...]] = {}
    others: set[str] = set()
    for attribute in gm.graph.find_nodes(op="get_attr"):
        name = str(attribute.target)
        if "." in name or not isinstance(getattr(gm, name, None), torch.fx.GraphModule):
            continue
        for user in attribute.users:
            site = _site(user)
            if site is None or attribute not in site[0]:
                others.add(name)
                continue
            known = sites.setdefault(name, site[1])
            sites[name] = tuple(a if a is b else None for a, b in zip(known, site[1], strict=True))
    return {name: operands for name, operands in sites.items() if name not in others}


def _site(node: Node) -> _Site | None:
    if not isinstance(node.target, HigherOrderOperator) or node.kwargs:
        return None
    read = _OPERATORS.get(str(node.target))
    try:
        return read(*node.args) if read is not None else None
    except TypeError:  # another version of PyTorch, with other arguments
        return None
