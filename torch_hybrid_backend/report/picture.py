"""A plan as values of JSON, for the page to draw. Empty values are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_hybrid_backend.core.plan import NodeDecision, Plan, Refusal, RegionDecision
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.units import flops_in_words
from torch_hybrid_backend.report.operator_times import operator_times
from torch_hybrid_backend.report.share import (
    costs_in_words,
    engine_in_words,
    kernels_in_words,
    size_in_words,
    tensor_in_words,
    title,
    without_digits,
)


def picture(plan: Plan) -> Mapping[str, Any]:
    """The graph of a plan: operators in order with their times, inputs, outputs, modules, regions, and timed kernels."""
    times = operator_times(plan)
    rows = list(plan.profile.kernels) if plan.profile is not None else []
    numbers = {id(row): number for number, row in enumerate(rows)}
    read = {name for node in plan.nodes for name in node.inputs} | set(plan.outputs)
    nodes = [
        _node(node)
        | _filled(
            us=round(times.microseconds[node.name], 3),
            kernels=[numbers[id(row)] for row in times.kernels.get(node.name, ())],
        )
        for node in plan.nodes
    ]
    return {
        "title": title(plan),
        "timing": times.kind,
        "other_us": round(times.other_us, 3),
        "nodes": nodes,
        "inputs": [
            {"name": given.name, **_values([given.spec] if given.spec else [])}
            for given in plan.inputs
            if not given.is_constant and given.name in read
        ],
        "constants": {g.name: _values([g.spec])["out"] for g in plan.inputs if g.is_constant and g.spec is not None},
        "called": _filled(**{given.name: given.called for given in plan.inputs}),
        "outputs": list(plan.outputs),
        "modules": [[call.path, call.class_name, call.parent] for call in plan.modules],
        "regions": {region.name: _region(region) for region in plan.regions},
        "kernels": [
            {"name": without_digits(row.kernel), "us": round(row.microseconds, 3), "nodes": len(row.nodes)}
            | _filled(
                rate=f"{row.gflops:.1f} GFLOP/s, {row.gbytes:.1f} GB/s" if row.flops else f"{row.gbytes:.1f} GB/s"
            )
            for row in rows
        ],
    }


def _node(node: NodeDecision) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.operator,
        "engine": node.engine,
        "region": node.region,
        "module": node.module,
        "source": node.source,
        "in": list(node.inputs),
        **_values(node.outputs),
        **_filled(
            view=node.is_view,
            work=flops_in_words(node.flops) if node.flops else "",
            refused=_refusals(node.refusals),
            device=str(node.device) if node.device is not None and not node.device.is_host else "",
        ),
    }


def _values(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        "out": [tensor_in_words(spec.shape, spec.dtype) for spec in specs],
        "bytes": sum(spec.typical_bytes for spec in specs),
    }


def _region(region: RegionDecision) -> dict[str, Any]:
    about = f"{engine_in_words(region)}, {size_in_words(len(region.node_names), region.flops)}"
    return {
        "about": about,
        "cost": costs_in_words(region.costs),
        "kernels": kernels_in_words(region),
        "refused": _refusals(region.refusals),
    }


def _refusals(refusals: Sequence[Refusal]) -> list[str]:
    return [f"{refusal.engine}: {refusal.code}: {refusal.why}" for refusal in refusals]


def _filled(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}
