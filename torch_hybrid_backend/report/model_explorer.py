"""Plans as graphs for Model Explorer (https://github.com/google-ai-edge/model-explorer), in its own JSON, which needs no adapter.

Modules become layers of Model Explorer. Operators have attributes (engine, time, kernel, refusals, source) and the colour of their engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import ModuleCall, Plan
from torch_hybrid_backend.report.picture import picture
from torch_hybrid_backend.report.share import title

# Light tints of the page's colours, for dark labels.
_COLOURS = ("#c2dcec", "#f9e4bd", "#bfe6dc", "#f2dde9", "#d9edf9", "#f4d6bf")
_EAGER = "#e2e3e5"


def render_model_explorer(plans: Sequence[Plan]) -> str:
    """JSON of a list of graphs, one for each plan."""
    names = sorted({node.engine for plan in plans for node in plan.nodes} - {EAGER})
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)} | {EAGER: _EAGER}
    return json.dumps([_graph(f"{number} {title(plan)}", plan, colours) for number, plan in enumerate(plans, 1)])


def _graph(name: str, plan: Plan, colours: Mapping[str, str]) -> dict[str, Any]:
    drawn = picture(plan)
    places = _namespaces(plan.modules)
    makers = {node["name"] for node in drawn["nodes"]} | {given["name"] for given in drawn["inputs"]}

    def node(values: Mapping[str, Any], label: str, **facts: Any) -> dict[str, Any]:
        return {
            "id": values["name"],
            "label": label,
            "namespace": places.get(values.get("module", ""), ""),
            "attrs": [{"key": key, "value": value} for key, value in facts.items() if value],
            "incomingEdges": [
                {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
                for number, source in enumerate(values.get("in", ()))
                if source in makers
            ],
            "outputsMetadata": [
                {"id": str(number), "attrs": [{"key": "tensor_shape", "value": spec}]}
                for number, spec in enumerate(values.get("out", ()))
            ],
            **({"style": {"backgroundColor": colours[values["engine"]]}} if "engine" in values else {}),
        }

    operators = (
        node(
            values,
            values["op"],
            engine=values["engine"],
            region=values["region"],
            **_times(values, drawn),
            refused="; ".join(values.get("refused", ())),
            work=values.get("work", ""),
            source=values["source"],
        )
        for values in drawn["nodes"]
    )
    inputs = (node(given, drawn["called"].get(given["name"], "input")) for given in drawn["inputs"])
    outputs = node({"name": "(outputs)", "in": drawn["outputs"]}, "outputs")
    classes = {places[call.path]: {"class": call.class_name} for call in plan.modules}
    return {"id": name, "nodes": [*inputs, *operators, outputs], "groupNodeAttributes": classes}


def _times(values: Mapping[str, Any], drawn: Mapping[str, Any]) -> dict[str, str]:
    if drawn["timing"] == "work" or not values.get("us"):
        return {}
    kernels = "; ".join(drawn["kernels"][number]["name"] for number in values.get("kernels", ()))
    return {"microseconds": f"{values['us']:.1f} ({drawn['timing']})", "kernel": kernels}


def _namespaces(modules: Sequence[ModuleCall]) -> Mapping[str, str]:
    """Module path -> the layer of its operators in Model Explorer, for example "encoder/layers.0/attention"."""
    groups: dict[str, str] = {}
    for call in modules:  # a module comes after those that call it
        name = call.path.removeprefix(f"{call.parent}.") if call.parent else call.path
        groups[call.path] = "/".join(filter(None, [groups.get(call.parent, ""), name]))
    return groups
