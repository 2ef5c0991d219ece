"""Time of each operator: from the times of kernels if the plan has them, else a part of its region's cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import KernelTime, NodeDecision, Plan, Profile

# A processor computes about this many operations in the time of a byte from memory. Work is only compared, never shown as a time.
_FLOPS_PER_BYTE = 20


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Microseconds of one call by operator. `other_us`: time that belongs to no operator.

    `kind`: "measured" if the times are those of kernels; "estimated" if the cost of each region is divided among its operators by their work;
    "work" if nothing was timed, and the numbers are work without a unit. `kernels`: the kernels that compute each operator.
    """

    kind: str
    microseconds: Mapping[str, float]
    other_us: float = 0.0
    kernels: Mapping[str, Sequence[KernelTime]] = field(default_factory=dict)


def operator_times(plan: Plan) -> OperatorTimes:
    """Times of operators, which add up to the timed part of a call. The time of a fused kernel counts for its operator with most work."""
    work = _work(plan)
    if plan.profile is not None:
        return _measured(plan, plan.profile, work)
    if plan.call is not None and plan.call.engine == EAGER:
        costs = {"": next((cost.microseconds for cost in plan.call.costs if cost.engine == EAGER), 0.0)}
        regions = {"": list(plan.nodes)}
    else:
        costs = {r.name: c.microseconds for r in plan.regions for c in r.costs if c.engine == r.engine}
        regions = defaultdict(list)
        for node in plan.nodes:
            regions[node.region].append(node)
    if not any(costs.get(name) for name in regions):
        return OperatorTimes("work", work)
    times: dict[str, float] = {}
    for name, nodes in regions.items():
        times |= _divided(costs.get(name, 0.0), nodes, work)
    return OperatorTimes("estimated", times)


def _measured(plan: Plan, profile: Profile, work: Mapping[str, float]) -> OperatorTimes:
    by_name = {node.name: node for node in plan.nodes}
    by_module: dict[str, list[NodeDecision]] = defaultdict(list)
    for node in plan.nodes:
        by_module[_path(node)].append(node)
    times = dict.fromkeys(by_name, 0.0)
    kernels: dict[str, list[KernelTime]] = defaultdict(list)
    other = profile.overhead_us
    for row in profile.kernels:
        module = row.modules[0] if row.modules else ""  # the module of the heaviest operator
        # If eager runs the whole call, rows have no region and name operators of Dynamo's graph. The plan's operators have the same modules.
        nodes = [by_name[name] for name in row.nodes if name in by_name] if row.region else by_module[module]
        if not nodes:
            other += row.microseconds
        elif row.region and row.kernel != EAGER:
            heaviest = max([node for node in nodes if _path(node) == module] or nodes, key=lambda node: work[node.name])
            times[heaviest.name] += row.microseconds
        else:
            for name, part in _divided(row.microseconds, nodes, work).items():
                times[name] += part
        for node in nodes:
            kernels[node.name].append(row)
    return OperatorTimes("measured", times, other, kernels)


def _path(node: NodeDecision) -> str:
    return node.module.partition("@")[0]


def _divided(microseconds: float, nodes: Sequence[NodeDecision], work: Mapping[str, float]) -> dict[str, float]:
    total = sum(work[node.name] for node in nodes)
    return {node.name: microseconds * (work[node.name] / total if total else 1 / len(nodes)) for node in nodes}


def _work(plan: Plan) -> dict[str, float]:
    """Work of each operator: its operations, or its bytes read and written if these take longer; 0 for views."""
    constants = {given.name for given in plan.inputs if given.is_constant}
    sizes = {given.name: given.spec.typical_bytes for given in plan.inputs if given.spec is not None}
    sizes |= {node.name: sum(spec.typical_bytes for spec in node.outputs) for node in plan.nodes}

    def moved(node: NodeDecision) -> int:
        written = sizes[node.name]
        # An embedding reads few rows of its table; only products read the whole of a parameter that is larger than their output.
        most = {name: sizes.get(name, 0) if node.flops or name not in constants else written for name in node.inputs}
        return written + sum(min(sizes.get(name, 0), limit) for name, limit in most.items())

    return {
        node.name: 0.0 if node.is_view else max(node.flops / _FLOPS_PER_BYTE, float(moved(node))) for node in plan.nodes
    }
