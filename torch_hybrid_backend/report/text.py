"""Plans as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch_hybrid_backend.core.plan import Plan, RegionDecision, attempts_in_words
from torch_hybrid_backend.report.share import (
    call_in_words,
    conversion_in_words,
    costs_in_words,
    counted,
    cuda_graphs_in_words,
    engine_in_words,
    kernels_in_words,
    operator_kinds,
    partitionings_in_words,
    precision_in_words,
    refused_operators,
    regions_title,
    size_in_words,
    summary,
)
from torch_hybrid_backend.report.times import profile_in_words

NOTHING_COMPILED = (
    "no graph was compiled: torch had compiled these calls before, or for another backend, or finds nothing to compile in them "
    "(docs/guides/troubleshooting.md)"
)


def render_text(plans: Sequence[Plan]) -> str:
    """The plans as text: summary, regions, operators by kind, and refusals. Ends without a newline."""
    if not plans:
        return NOTHING_COMPILED
    several = len(plans) > 1
    numbered = (f"graph {k} of {len(plans)}: " if several else "" for k in range(1, len(plans) + 1))
    return "\n\n".join(number + "\n".join(_plan(plan)) for number, plan in zip(numbered, plans, strict=True))


def _plan(plan: Plan) -> Iterable[str]:
    yield summary(plan)
    for number, line in enumerate(call_in_words(plan)):
        yield f"{'    ' if number else '  '}{line}"
    for number, line in enumerate(conversion_in_words(plan)):
        yield f"{'    ' if number else '  '}{line}"
    if plan.unrepeatable:
        yield f"  first call: its answer may differ from later ones by rounding, as {plan.unrepeatable} cannot be run twice unnoticed"
    for line in partitionings_in_words(plan):
        yield f"  {line}"
    for line in profile_in_words(plan):
        yield f"  {line}"
    if plan.regions:
        yield f"  {regions_title(plan)}:"
        for decision in plan.regions:
            yield from _region(decision, with_precision=plan.conversion is not None)
    for line in cuda_graphs_in_words(plan):
        yield f"  {line}"
    kinds = operator_kinds(plan)
    if kinds:
        width = max(len(kind) for kind, _, _ in kinds)
        yield f"  {'operators:':<{width + 2}}  in regions  in eager"
        for kind, inside, outside in kinds:
            yield f"    {kind:<{width}}  {inside:>10}  {outside:>8}"
    refusals = refused_operators(plan)
    if refusals:
        yield "  operators that engines do not take (docs/refusals.md explains the codes):"
        for item in refusals:
            refusal = item.refusal
            times = f" ({item.count} times)" if item.count > 1 else ""
            where = f" [{item.source}]" if item.source else ""
            yield f"    {refusal.engine} does not take {item.operator}{times}: {refusal.code}: {refusal.why}{where}"
    if plan.conversion is not None and plan.conversion.left:
        yield "  layers that stay as written (docs/refusals.md explains the codes):"
        for layer in plan.conversion.left:
            where = f" [{layer.source}]" if layer.source else ""
            yield f"    {layer.site or layer.name}, {layer.operator}: {layer.code}: {layer.why}{where}"


def _region(decision: RegionDecision, *, with_precision: bool) -> Iterable[str]:
    size = size_in_words(len(decision.node_names), decision.flops)
    kernels = f", in {counted(len(decision.kernels), 'kernel')}" if decision.kernels else ""
    error = "results not compared with eager's"
    if decision.max_error is not None:
        error = f"results differ from eager's by at most {decision.max_error:.2g}"
    where = f" [{decision.source}]" if decision.source else ""
    runs = f"{engine_in_words(decision)} runs {size}{kernels}"
    yield f"    {decision.name}: {runs}; {costs_in_words(decision.costs)}; {error}{where}"
    if with_precision:
        yield f"      in {precision_in_words(decision)}"
    if decision.attempts:
        yield f"      with {attempts_in_words(decision.attempts)}"
    if decision.note:
        yield f"      {decision.note}"
    if decision.kernels:
        yield f"      kernels: {kernels_in_words(decision)}"
    for operator, count in Counter(decision.operators).items():
        yield f"      calls PyTorch's {operator}{f' ({count} times)' if count > 1 else ''}"
    for refusal in decision.refusals:
        yield f"      not run by {refusal.engine}: {refusal.code}: {refusal.why}"
