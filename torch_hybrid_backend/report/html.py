"""Plans as a picture: one self-contained HTML page, no script, nothing loaded from elsewhere.

Each graph is a strip of cells, one per operator in graph order, coloured by engine and framed by region; under it the
tables that the text has. Pointing at a cell shows the operator, its region and the user's line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Attempt, NodeDecision, Plan, attempts_in_words
from torch_hybrid_backend.core.units import flops_in_words
from torch_hybrid_backend.report.share import (
    call_in_words,
    conversion_in_words,
    costs_in_words,
    cuda_graphs_in_words,
    engine_in_words,
    operator_kinds,
    precision_in_words,
    refused_operators,
    regions_title,
    shares,
    summary,
)

# Distinct for colour-blind readers (Okabe and Ito); an engine's place in the sorted names picks its colour, eager is
# grey.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_EAGER = "#b0b0b0"

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border-bottom: 1px solid #ddd; padding: .2em .8em; text-align: left; vertical-align: top; }
td.n { text-align: right; }
.strip { display: flex; flex-wrap: wrap; gap: 4px; margin: 1em 0; }
.segment { border: 1px solid #666; border-radius: 3px; padding: 2px; display: flex; flex-wrap: wrap; max-width: 100%; }
.segment b { font-size: 11px; margin: 0 4px; }
.cell { width: 10px; height: 16px; margin: 1px; }
.bar { display: flex; height: 18px; width: 100%; max-width: 60em; }
.key { display: inline-block; width: 1em; height: 1em; vertical-align: -.15em; margin: 0 .3em 0 1em; }
"""


def render_html(plans: Sequence[Plan]) -> str:
    """A page with one section per plan."""
    names = sorted({node.engine for plan in plans for node in plan.nodes} - {EAGER})
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)} | {EAGER: _EAGER}
    legend = "".join(f'<span class="key" style="background:{c}"></span>{escape(n)}' for n, c in colours.items())
    sections = "\n".join("\n".join(_section(plan, colours)) for plan in plans) or "<p>no graph was compiled</p>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>Where the operators run</h1><p>{legend}</p>\n{sections}\n</body></html>\n"
    )


def _section(plan: Plan, colours: dict[str, str]) -> Iterable[str]:
    yield f"<section><h2>{escape(plan.graph)} ({escape(plan.kind)})</h2><p>{escape(summary(plan))}</p>"
    for line in (*call_in_words(plan), *conversion_in_words(plan)):
        yield f"<p>{escape(line)}</p>"
    parts = [share for share in shares(plan) if share.fraction]
    if parts:
        cells = "".join(
            f'<div style="background:{colours[share.engine]};width:{share.fraction:.2%}" '
            f'title="{escape(share.engine)}: {share.fraction:.1%} of flops"></div>'
            for share in parts
        )
        yield f'<div class="bar">{cells}</div>'
    yield '<div class="strip">'
    for region, nodes in groupby(plan.nodes, key=lambda node: node.region):
        label = f"<b>{escape(region)}</b>" if region else ""
        yield f'<div class="segment">{label}{"".join(_cell(node, colours) for node in nodes)}</div>'
    yield "</div>"
    if plan.regions:
        yield f"<p>{escape(regions_title(plan))}</p>"
    yield _table(
        (
            "region",
            "engine",
            "operators",
            "flops",
            "kernels",
            "calls",
            "cost",
            "precision",
            "max error",
            "not run by",
            "source",
        ),
        (
            (
                decision.name,
                engine_in_words(decision),
                len(decision.node_names),
                flops_in_words(decision.flops),
                len(decision.kernels),
                "; ".join(decision.operators),
                costs_in_words(decision.costs),
                "; ".join([precision_in_words(decision), *_with(decision.attempts), *filter(None, [decision.note])]),
                "not verified" if decision.max_error is None else f"{decision.max_error:.2g}",
                "; ".join(f"{r.engine}: {r.code}: {r.why}" for r in decision.refusals),
                decision.source,
            )
            for decision in plan.regions
        ),
    )
    for line in cuda_graphs_in_words(plan):
        yield f"<p>{escape(line)}</p>"
    yield _table(("operator", "in regions", "in eager"), operator_kinds(plan))
    yield _table(
        ("refused operator", "times", "engine", "code", "why", "source"),
        (
            (item.operator, item.count, item.refusal.engine, item.refusal.code, item.refusal.why, item.source)
            for item in refused_operators(plan)
        ),
    )
    yield _table(
        ("layer as written", "operator", "code", "why", "source"),
        (
            (layer.site or layer.name, layer.operator, layer.code, layer.why, layer.source)
            for layer in (plan.conversion.left if plan.conversion is not None else ())
        ),
    )
    yield "</section>"


def _with(attempts: Sequence[Attempt]) -> list[str]:
    return [f"with {attempts_in_words(attempts)}"] if attempts else []


def _cell(node: NodeDecision, colours: dict[str, str]) -> str:
    facts = [f"{node.name}: {node.operator}", node.engine, node.source]
    facts += [f"not {r.engine}: {r.code}: {r.why}" for r in node.refusals]
    title = escape("\n".join(filter(None, facts)))
    return f'<div class="cell" style="background:{colours[node.engine]}" title="{title}"></div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["<tr>" + "".join(_data(value) for value in row) + "</tr>" for row in rows]
    if not lines:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<table><tr>{head}</tr>\n" + "\n".join(lines) + "</table>"


def _data(value: object) -> str:
    kind = ' class="n"' if isinstance(value, int) else ""
    return f"<td{kind}>{escape(str(value))}</td>"
