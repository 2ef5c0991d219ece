"""Plans as a self-contained HTML page, which loads nothing.

The page holds the graphs of the plans as JSON (`report/picture.py`). Scripts of report/page/ draw them: `tree.js` makes boxes of modules,
`layout.js` places the boxes with dagre, `draw.js` and `flame.js` draw with d3, `details.js` fills the panel, `page.js` handles events. Tables
are plain HTML and can be read without scripts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from torch_hybrid_backend.core.plan import Attempt, GraphBreak, Plan, attempts_in_words
from torch_hybrid_backend.core.units import flops_in_words, time_in_words
from torch_hybrid_backend.report.picture import picture
from torch_hybrid_backend.report.share import (
    call_in_words,
    conversion_in_words,
    costs_in_words,
    counted,
    cuda_graphs_in_words,
    engine_in_words,
    graph_break_in_words,
    kind_in_words,
    operator_kinds,
    partitionings_in_words,
    parts_in_words,
    precision_in_words,
    refused_operators,
    regions_title,
    title,
    without_digits,
)
from torch_hybrid_backend.report.text import NOTHING_COMPILED
from torch_hybrid_backend.report.times import ceilings_in_words


@dataclass(frozen=True, slots=True)
class _Number:
    """Cell of a table: the text to show, and the number to sort by."""

    words: str
    value: float


def render_html(
    plans: Sequence[Plan], about: Mapping[str, str] | None = None, graph_breaks: Sequence[GraphBreak] = ()
) -> str:
    """The page, with one graph for each plan, shown one at a time. `about`: the head of the page by name; "model" is the title."""
    facts = dict(about or {})
    parts = {
        "title": escape(facts.pop("model", "Plans")),
        "about": "".join(f'<span title="{escape(name)}">{escape(value)}</span>' for name, value in facts.items()),
        "graphs": "\n".join(_section(n, _head(plan, _name(plan, facts, plans))) for n, plan in enumerate(plans))
        or f"<p>{escape(NOTHING_COMPILED)}</p>",
        "breaks": "\n".join(_graph_breaks(graph_breaks)),
        "shown": "" if plans else "hidden",
        "several": "" if len(plans) > 1 else "hidden",
        "choices": "".join(f'<option value="{n}">{escape(title(plan))}</option>' for n, plan in enumerate(plans)),
        "tables": "\n".join(_section(number, _tables(plan)) for number, plan in enumerate(plans)),
        # Texts of the user may contain "</script>".
        "data": json.dumps({"graphs": [picture(plan) for plan in plans]}, separators=(",", ":")).replace(
            "<", "\\u003c"
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _template())


def _name(plan: Plan, facts: Mapping[str, str], plans: Sequence[Plan]) -> str:
    """The plan's title, or only its kind if the page shows the title's other parts elsewhere."""
    return kind_in_words(plan) if "inputs" in facts or len(plans) > 1 else title(plan)


@functools.cache
def _template() -> str:
    """The page with its style and scripts inserted."""
    folder = resources.files("torch_hybrid_backend.report")

    def text(name: str) -> str:
        place = "vendored" if name.endswith(".min.js") else "page"
        return (folder / place / name).read_text(encoding="utf-8").strip()

    page = text("page.html").replace("{{style}}", text("page.css"))
    return re.sub(r"\{\{([\w.]+\.js)\}\}", lambda found: text(found[1]), page) + "\n"


def _graph_breaks(found: Sequence[GraphBreak]) -> Iterable[str]:
    if found:
        yield f"<details><summary>{counted(len(found), 'graph break')}, where Dynamo leaves the model to Python</summary><ul>"
        for where, *told in map(graph_break_in_words, found):
            yield f"<li>{escape(where)}<br>{'<br>'.join(map(escape, told))}</li>"
        yield "</ul></details>"


def _section(number: int, lines: Iterable[str]) -> str:
    return f'<section data-graph="{number}">\n' + "\n".join(lines) + "\n</section>"


def _head(plan: Plan, name: str) -> Iterable[str]:
    """Lines about the plan, the first of which begins with `name`."""
    parts = parts_in_words(plan, views="drawn on request")
    ceilings = plan.profile and plan.profile.ceilings
    lines = (
        f"{name}: {parts}",
        *call_in_words(plan),
        *conversion_in_words(plan),
        *partitionings_in_words(plan),
        *cuda_graphs_in_words(plan),
    )
    for line in (*lines, *([ceilings_in_words(ceilings)] if ceilings else [])):
        yield f'<p class="line">{escape(line)}</p>'


def _tables(plan: Plan) -> Iterable[str]:
    if plan.profile is not None:
        yield _table(
            "Kernels by time",
            ("kernel", "time", "share", "GFLOP/s", "GB/s", "modules", "region", "source"),
            (
                (
                    without_digits(row.kernel),
                    _Number(time_in_words(row.microseconds), row.microseconds),
                    _share(row.microseconds, plan.profile.call_us),
                    round(row.gflops, 1),
                    round(row.gbytes, 1),
                    ", ".join(row.modules),
                    row.region,
                    row.source,
                )
                for row in sorted(plan.profile.kernels, key=lambda row: -row.microseconds)
            ),
        )
    yield _table("Operators inside and outside regions", ("operator", "in regions", "in eager"), operator_kinds(plan))
    yield _table(
        regions_title(plan).capitalize(),
        (
            "region",
            "engine",
            "operators",
            "work",
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
                _Number(flops_in_words(decision.flops) if decision.flops else "", decision.flops),
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
    yield _table(
        "Operators that an engine refused",
        ("operator", "times", "engine", "code", "why", "source"),
        (
            (item.operator, item.count, item.refusal.engine, item.refusal.code, item.refusal.why, item.source)
            for item in refused_operators(plan)
        ),
    )
    yield _table(
        "Layers as written",
        ("layer as written", "operator", "code", "why", "source"),
        (
            (layer.site or layer.name, layer.operator, layer.code, layer.why, layer.source)
            for layer in (plan.conversion.left if plan.conversion is not None else ())
        ),
    )


def _share(part: float, whole: float) -> _Number | str:
    return _Number(f"{part / whole:.1%}", part / whole) if whole else ""


def _with(attempts: Sequence[Attempt]) -> list[str]:
    return [f"with {attempts_in_words(attempts)}"] if attempts else []


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that folds, sorted by a click on a head; "" without rows. Empty columns are left out."""
    cells = [tuple(row) for row in rows]
    if not cells:
        return ""
    used = [i for i in range(len(heads)) if any(row[i] != "" for row in cells)]
    head = "".join(f"<th>{escape(heads[i])}</th>" for i in used)
    body = "\n".join("<tr>" + "".join(_data(row[i]) for i in used) + "</tr>" for row in cells)
    table = f'<table class="sorts"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
    return f'<details open><summary>{escape(title)}</summary><div class="tables">{table}</div></details>'


def _data(value: object) -> str:
    if isinstance(value, _Number):
        return f'<td class="n" data-value="{value.value:.12g}">{escape(value.words)}</td>'
    kind = ' class="n"' if isinstance(value, int | float) else ""
    return f"<td{kind}>{escape(str(value))}</td>"
