"""Entries of a plan for a partitioned graph: operators, inputs with their values, and the modules that call them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import GraphInput, ModuleCall, NodeDecision, Refusal
from torch_hybrid_backend.core.region import Segment
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Refused, Verdict
from torch_hybrid_backend.graph.schema import is_item, is_view
from torch_hybrid_backend.graph.source import module_call, module_stack, source_line


def node_decision(
    node: Node, device: Device | None, segment: Segment, verdicts: Sequence[Verdict], names: Sequence[str], flops: int
) -> NodeDecision:
    """The decision about one operator of `segment`. `verdicts`: the engines' verdicts on it. `names`: the engines' names, eager last."""
    answers = zip(names, verdicts, strict=False)  # eager, the last name, gives no verdict
    refusals = tuple(Refusal.of(name, verdict) for name, verdict in answers if isinstance(verdict, Refused))
    return NodeDecision(
        name=node.name,
        operator=_operator_name(node),
        engine=segment.engine_hint,
        region="" if segment.engine_hint == EAGER else segment.region.name,
        source=source_line(node),
        flops=flops,
        refusals=refusals,
        device=device,
        inputs=tuple(source.name for source in node.all_input_nodes),
        outputs=tuple(_specs(node.meta.get("val"))),
        module=module_call(node),
        is_view=is_view(node) or is_item(node),
    )


def graph_inputs(graph: torch.fx.Graph, constants: frozenset[str]) -> tuple[GraphInput, ...]:
    """Values that operators of the graph read and no operator computes: inputs and attributes. `constants`: names of constant inputs."""
    return tuple(
        GraphInput(
            node.name,
            next(_specs(node.meta.get("val")), None),
            node.op == "get_attr" or node.name in constants,
            node.meta.get("called", ""),
        )
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
    )


def module_calls(graph: torch.fx.Graph) -> tuple[ModuleCall, ...]:
    """The modules that call the graph's operators, and the modules around these, each once, in the graph's order."""
    modules: dict[str, ModuleCall] = {}
    for node in graph.nodes:
        parent = ""
        for path, class_name in module_stack(node) if node.op == "call_function" else ():
            modules.setdefault(path, ModuleCall(path, class_name, parent))
            parent = path
    return tuple(modules.values())


def _specs(value: object) -> Iterator[TensorSpec]:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            yield TensorSpec.of(item)


def _operator_name(node: Node) -> str:
    if isinstance(node.target, str):
        return f"{node.op}:{node.target}"
    return "getitem" if is_item(node) else str(node.target)
