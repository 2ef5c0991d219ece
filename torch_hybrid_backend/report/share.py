"""Facts about a plan that all reports share: each engine's share, refusals, and texts in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Cost, GraphBreak, Plan, Refusal, RegionDecision
from torch_hybrid_backend.core.units import flops_in_words, time_in_words

_NAMED = 8  # layers that a line names
_NAMED_INPUTS = 3  # inputs that a title names

DISTURBED = "measured beside other load, so it may be far off"
_KINDS = {"disturbed": DISTURBED, "cached": "measured earlier"}


@dataclass(frozen=True, slots=True)
class Share:
    """Share of an engine in a plan: operators, and floating-point operations (flops) of a call.

    `fraction`: flops divided by those of the plan; None if the plan has none (no product, convolution or attention).
    """

    engine: str
    operators: int
    flops: int
    fraction: float | None


@dataclass(frozen=True, slots=True)
class RefusedOperators:
    """Operators of one kind and one source line that an engine refused for one reason. `count`: their number."""

    operator: str
    refusal: Refusal
    source: str
    count: int


def shares(plan: Plan) -> tuple[Share, ...]:
    """Shares of the engines that run operators, the largest first: by flops, then by operators."""
    operators: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for node in plan.nodes:
        operators[node.engine] += 1
        flops[node.engine] += node.flops
    total = flops.total()
    unsorted = [Share(e, operators[e], flops[e], flops[e] / total if total else None) for e in operators]
    return tuple(sorted(unsorted, key=lambda share: (-share.flops, -share.operators, share.engine)))


def refused_operators(plan: Plan) -> tuple[RefusedOperators, ...]:
    """The refusals of operators in graph order, equal ones counted together."""
    counts = Counter((node.operator, refusal, node.source) for node in plan.nodes for refusal in node.refusals)
    return tuple(RefusedOperators(operator, refusal, source, n) for (operator, refusal, source), n in counts.items())


def operator_kinds(plan: Plan) -> tuple[tuple[str, int, int], ...]:
    """(operator, its count in regions of other engines than eager, its count in eager), the most frequent first."""
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for node in plan.nodes:
        (outside if node.engine == EAGER else inside)[node.operator] += 1
    total = inside + outside
    return tuple((kind, inside[kind], outside[kind]) for kind in sorted(total, key=lambda kind: (-total[kind], kind)))


def engine_in_words(decision: RegionDecision) -> str:
    """The engine, and the device unless it is the host: "tvm", "eager on cuda:1"."""
    return decision.engine if decision.device.is_host else f"{decision.engine} on {decision.device}"


def costs_in_words(costs: Sequence[Cost]) -> str:
    """For example "tvm 12.0 us, eager 31.5 us (measured)", or "not timed"."""
    if not costs:
        return "not timed"
    prices = ", ".join(f"{cost.engine} {time_in_words(cost.microseconds)}" for cost in costs)
    return f"{prices} ({_KINDS.get(costs[0].kind, costs[0].kind)})"


def call_in_words(plan: Plan) -> tuple[str, ...]:
    """Costs of whole calls with the engine that runs them, then the reason if the plan lost. Empty if whole calls were not priced."""
    if plan.call is None:
        return ()
    lost = (f"not the {r.engine}: {r.code}: {r.why}" for r in plan.call.refusals)
    least = min((cost.microseconds for cost in plan.call.costs), default=0.0)
    runs = "the plan runs it" if plan.call.engine == "plan" else f"{plan.call.engine} runs it"
    if any(cost.engine == plan.call.engine and cost.microseconds > least for cost in plan.call.costs):
        runs += ", as another must be clearly faster"
    return f"a whole call: {costs_in_words(plan.call.costs)}: {runs}", *lost


def partitionings_in_words(plan: Plan) -> tuple[str, ...]:
    """Cost of a call for each partitioning, named by the engines in the order asked; empty if there was one partitioning."""
    if not plan.partitionings:
        return ()
    kinds = {"more than": "given up at "}
    return tuple(
        f"operators offered to {cost.engine} in this order: {kinds.get(cost.kind, '')}{time_in_words(cost.microseconds)}"
        f"{' (measured earlier)' if cost.kind == 'cached' else ''}"
        for cost in plan.partitionings
    )


def conversion_in_words(plan: Plan) -> tuple[str, ...]:
    """Conversion to another precision, with the error of outputs against the graph as written; empty for a graph as written."""
    made = plan.conversion
    if made is None:
        return ()
    (first, count), *others = made.converted or ((made.precision, 0),)
    converted = [f"{count}/{made.operators} operators to {first}", *(f"{n} to {name}" for name, n in others)]
    casts = f"{counted(made.casts, 'cast')} ({made.weight_casts} of weights, made once)"
    lines = [f"converted {', '.join(converted)}, using {casts}"]
    if made.error is not None:
        lines.append(
            f"outputs differ from those as written by {made.error:.2g} (relative root mean square), {made.tolerance:.2g} is allowed"
        )
        if made.unseen:
            lines.append(
                f"nothing is known yet of the error of {_listed(made.unseen)}: their inputs were all alike or nearly all zero. "
                "A later call whose inputs vary is compared too"
            )
    elif made.unchecked:
        lines.append(f"outputs were not compared with those as written: {made.unchecked}")
    return tuple(lines)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def precision_in_words(decision: RegionDecision) -> str:
    """For example "bfloat16 and float32, off by 0.003"."""
    precisions = " and ".join(decision.precision)
    return precisions if decision.precision_error is None else f"{precisions}, off by {decision.precision_error:.2g}"


def kernels_in_words(decision: RegionDecision) -> str:
    """Kernels of the region, equal names counted together: "12 matmul_gelu, row_softmax"."""
    return _names_in_words(decision.kernels)


def cuda_graphs_in_words(plan: Plan) -> tuple[str, ...]:
    """Kernels of each CUDA graph: "one CUDA graph of 3 kernels: 2 row_softmax, map_add"."""
    return tuple(f"one CUDA graph of {counted(len(g), 'kernel')}: {_names_in_words(g)}" for g in plan.cuda_graphs)


def _names_in_words(kernels: Sequence[str]) -> str:
    counts = Counter(map(without_digits, kernels))
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.items())


def without_digits(kernel: str) -> str:
    """A kernel's name without its hash."""
    return re.sub(r"_[0-9a-f]{16}$", "", kernel)


def graph_break_in_words(found: GraphBreak) -> tuple[str, ...]:
    """The source line of a graph break, the reason, and hints for a change."""
    rest = "; the rest of the function runs in Python" if found.is_last else ""
    why = f"{found.reason}: {found.explanation}" if found.explanation else found.reason
    return found.source, f"{why.rstrip('.')}{rest}", *(f"change: {hint}" for hint in found.hints)


def regions_title(plan: Plan) -> str:
    """Title of the table of regions."""
    used = plan.call is None or plan.call.engine == "plan"
    return "regions, each run by one engine" if used else "regions of the plan, which is not used"


def tensor_in_words(shape: Sequence[object], dtype: str) -> str:
    """For example "1x64x56x56 float32"."""
    return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"


def counted(number: int, noun: str) -> str:
    """For example "1 kernel", "2 kernels"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_in_words(operators: int, flops: int, of_them: str = "") -> str:
    """For example "12 operators, 8.20 GFLOP". Only operations of products and convolutions count; without any, they are left out.
    `of_them`: text after the number of operators."""
    return ", ".join([counted(operators, "operator") + of_them, *([flops_in_words(flops)] if flops else [])])


def summary(plan: Plan) -> str:
    """The plan in one line: title, operators, regions, and each engine's share."""
    return f"{title(plan)}: {parts_in_words(plan)}"


def parts_in_words(plan: Plan, views: str = "") -> str:
    """Operators, regions and each engine's share: "3 operators, 4.00 MFLOP, 2 regions; tvm runs 2, eager runs 1". `views`: text after the
    number of views; "" leaves views out."""
    parts = []
    for share in shares(plan):
        part = f"{share.engine} runs {share.operators}"
        parts.append(part if share.fraction is None else f"{part} ({share.fraction:.1%} of flops)")
    nothing = sum(node.is_view for node in plan.nodes)
    of_them = f" ({counted(nothing, 'view')} among them, {views})" if nothing and views else ""
    size = size_in_words(len(plan.nodes), sum(node.flops for node in plan.nodes), of_them)
    return f"{size}, {counted(len(plan.regions), 'region')}; " + (", ".join(parts) or "nothing to run")


def kind_in_words(plan: Plan) -> str:
    """The use of the graph: "inference", "training, forward" or "training, backward"."""
    return plan.kind if plan.kind == "inference" else f"training, {plan.kind}"


def title(plan: Plan) -> str:
    """Model, use and input shapes of the graph, for example "ResNet (inference, 1x3x224x224 float32)"."""
    kind = kind_in_words(plan)
    inputs = [value.spec for value in plan.inputs if not value.is_constant and value.spec is not None]
    shapes = [tensor_in_words(spec.shape, spec.dtype) for spec in inputs[:_NAMED_INPUTS]]
    more = [f"{len(inputs) - _NAMED_INPUTS} more inputs"] if len(inputs) > _NAMED_INPUTS else []
    return f"{plan.graph} ({', '.join([kind, *shapes, *more])})"
