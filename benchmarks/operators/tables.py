"""Results as Markdown: a line for each kind of operator, a line for each operator, and the time that models lose.

python -m benchmarks.operators.tables      # the .md beside every operators.json under benchmarks/results/
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.operators.results import OURS, SIDES, Result, standing
from benchmarks.operators.shapes import KINDS
from benchmarks.table import RESULTS

_TITLES = {"aten": "ATen", "onednn": "oneDNN", "mkl": "MKL", "inductor": "inductor"}


def report(record: Mapping[str, Any]) -> str:
    """Everything about a record: on what, by kind, by operator."""
    about, settings = record["machine"], record["settings"]
    results = [Result.read(row) for row in record["results"]]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "apache-tvm"))
    caption = (
        f"{about['cpu']}, {about['cores']} cores, {settings['threads']} threads, {about['capability']}; float32; {versions}; "
        f"{about['day']}. Microseconds, medians of interleaved rounds in one process; a ratio above 1 means that hybrid is faster. "
        "MKL: torch.ops.mkl with the weight packed ahead, the activation behind it a call of its own (ATen's products are MKL's too, with "
        'plain weights). "peak": share of what the measured ceilings allow for the operator\'s arithmetic and least traffic.'
    )
    rule = settings["selection"]
    return "\n\n".join((f"{caption} {rule}".strip(), by_kind(results), table(results)))


def by_kind(results: Sequence[Result]) -> str:
    """A line for each kind, and one for all."""
    sides = _sides(results)
    header = ["kind", "operators", *(f"{_TITLES[side]} / ours" for side in sides), "best other / ours", "ahead", "peak"]
    lines = [_line(header), "|---" + "|---:" * (len(header) - 1) + "|"]
    groups = {kind: [r for r in results if r.kind == kind and not r.error] for kind in KINDS}
    groups["all (geometric mean)"] = [r for r in results if not r.error]
    for title, some in groups.items():
        if some:
            s = standing(some)
            ratios = (f"{s.ratios[side]:.2f}" if side in s.ratios else "-" for side in sides)
            lines.append(
                _line([title, str(s.operators), *ratios, f"{s.best:.2f}", f"{s.ahead:.0%}", f"{s.peak_share:.0%}"])
            )
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    """A table with a line for each operator."""
    sides = _sides(results)
    header = ["kind", "operator", "epilogue", "ours, us", "rate", "peak", *(_TITLES[s] for s in sides)]
    lines = [_line([*header, "best other / ours"]), "|---" * (len(header) + 1) + "|"]
    for r in results:
        if r.error:
            lines.append(_line([r.kind, r.title, r.epilogue, r.error, *[""] * (len(sides) + 3)]))
            continue
        us = r.microseconds[OURS]
        rate = f"{r.flops / us / 1e3:.0f} GFLOP/s" if r.flops else f"{r.size_bytes / us / 1e3:.1f} GB/s"
        others = (f"{r.microseconds[s]:.1f}" if s in r.microseconds else "-" for s in sides)
        best = f"{r.ratio():.2f} ({r.best_other[0]})"
        lines.append(_line([r.kind, r.title, r.epilogue, f"{us:.1f}", rate, f"{r.peak_share:.0%}", *others, best]))
    return "\n".join(lines)


def losses(results: Sequence[Result], models: Sequence[str]) -> str:
    """Time lost to the best other side in one call of each model, largest first.

    An operator that models run with several epilogues is counted with the mean over them.
    """
    by_case: dict[tuple[str, str, int], list[Result]] = {}
    for r in results:
        if not r.error:
            by_case.setdefault((r.kind, r.title, r.batch), []).append(r)
    rows = []
    for (kind, title, batch), some in by_case.items():
        lost = sum(r.microseconds[OURS] - r.best_other[1] for r in some) / len(some)
        ours = sum(r.microseconds[OURS] for r in some) / len(some)
        for model, count in some[0].counts:
            if model in models and lost > 0:
                rows.append((lost * count, count, lost / ours, model, batch, kind, title, some[0].best_other[0]))
    rows.sort(key=lambda row: -row[0])
    lines = ["| lost, us a call | model | batch | kind | operator | count | share lost | to |", "|---" * 8 + "|"]
    for total, count, share, model, batch, kind, title, other in rows:
        lines.append(f"| {total:.0f} | {model} | {batch} | {kind} | {title} | {count} | {share:.0%} | {other} |")
    return "\n".join(lines)


def _sides(results: Sequence[Result]) -> list[str]:
    return [side for side in SIDES if any(side in r.microseconds for r in results)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(path: Path) -> None:
    """The Markdown of a record, beside it."""
    path.with_suffix(".md").write_text(report(json.loads(path.read_text())) + "\n")


def main() -> None:
    """Write the tables of all records."""
    for path in sorted(RESULTS.rglob("operators.json")):
        write(path)


if __name__ == "__main__":
    main()
