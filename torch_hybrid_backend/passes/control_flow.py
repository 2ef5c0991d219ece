"""Bodies of control flow: branches of `cond`, conditions and bodies of `while_loop`, steps of `scan` and `map`.

Eager runs the operators themselves, and calls the bodies with plain tensors. Bodies are functional ATen graphs, as the outer graph is, and are
compiled as graphs of their own. Sub-graphs that their operator maps over a batch are not compiled: those of `associative_scan` and
`flex_attention`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.torch_private import HigherOrderOperator

Node = torch.fx.Node

# Takes the operands as a list, returns the outputs as a list.
Run = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class Site:
    """A call of a control flow operator: its bodies, and the operands, one for each of their placeholders. The first `changing` operands are
    other ones in each iteration."""

    bodies: tuple[Any, ...]
    operands: tuple[Any, ...]
    changing: int = 0

    @property
    def lasting(self) -> tuple[Any, ...]:
        """The operands; None for those that change."""
        return (*(None for _ in self.operands[: self.changing]), *self.operands[self.changing :])


def _cond(_predicate: Any, if_true: Any, if_false: Any, operands: Sequence[Any]) -> Site:
    return Site((if_true, if_false), tuple(operands))


def _while_loop(condition: Any, body: Any, carried: Sequence[Any], others: Sequence[Any]) -> Site:
    return Site((condition, body), (*carried, *others), len(carried))


def _scan(step: Any, carried: Sequence[Any], scanned: Sequence[Any], others: Sequence[Any]) -> Site:
    return Site((step,), (*carried, *scanned, *others), len(carried) + len(scanned))


def _map(body: Any, mapped: Sequence[Any], others: Sequence[Any]) -> Site:
    return Site((body,), (*mapped, *others), len(mapped))


def _invoke_subgraph(body: Any, _identifier: Any, *operands: Any) -> Site:
    return Site((body,), operands)


_OPERATORS: Mapping[str, Callable[..., Site]] = {
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
        self.run = run
        self._pack: Callable[[list[Any]], Any] = (
            list if isinstance(returns, list) else tuple if isinstance(returns, tuple) else operator.itemgetter(0)
        )

    def forward(self, *operands: Any) -> Any:
        return self._pack(self.run(list(operands)))


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
            site = site_of(user)
            if site is None or attribute not in site.bodies:
                others.add(name)
                continue
            known = sites.setdefault(name, site.lasting)
            sites[name] = tuple(a if a is b else None for a, b in zip(known, site.lasting, strict=True))
    return {name: operands for name, operands in sites.items() if name not in others}


def site_of(node: Node) -> Site | None:
    """The call that a node makes; None where it calls no control flow operator that is known."""
    if not isinstance(node.target, HigherOrderOperator) or node.kwargs:
        return None
    read = _OPERATORS.get(str(node.target))
    try:
        return read(*node.args) if read is not None else None
    except TypeError:  # another version of PyTorch, with other arguments
        return None
