"""The results as Markdown: printed by the runner, and put into the README.

python -m benchmarks.table README.md        # from every file under benchmarks/results/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import ZOO

START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
RESULTS = Path(__file__).parent / "results"


def markdown(record: dict[str, Any]) -> str:
    """One record as a table: a row per model and batch; milliseconds, hybrid's ratios to the others, its compile time."""
    results = {(r["model"], r["batch"], r["backend"]): r for r in record["results"]}
    rows = dict.fromkeys((r["model"], r["batch"]) for r in record["results"])
    backends = list(dict.fromkeys(r["backend"] for r in record["results"]))
    ours = "hybrid" in backends
    header = ["model", "batch", *(f"{backend} ms" for backend in backends)]
    if ours:
        header += [f"{backend} / hybrid" for backend in backends if backend != "hybrid"] + ["hybrid compiles in"]
    lines = [_caption(record), "", _row(header), _row(["---", *("---:" for _ in header[1:])])]
    for model, batch in rows:
        times = {backend: results.get((model, batch, backend), {}).get("median_ms") for backend in backends}
        cells = [ZOO[model].title if model in ZOO else model, str(batch), *map(_milliseconds, times.values())]
        if ours:
            cells += [_ratio(times[backend], times["hybrid"]) for backend in backends if backend != "hybrid"]
            compiled = results.get((model, batch, "hybrid"), {}).get("compile_s")
            cells.append("-" if compiled is None else f"{compiled:.1f} s")
        lines.append(_row(cells))
    return "\n".join(lines)


def _caption(record: dict[str, Any]) -> str:
    about = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, {about['capability']}; float32; "
        f"{versions}; {about['day']}. Median of one call in milliseconds; a ratio above 1 means that hybrid is faster."
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _ratio(other: float | None, own: float | None) -> str:
    return "-" if other is None or own is None else f"{other / own:.2f}"


def with_results(text: str, records: Sequence[dict[str, Any]]) -> str:
    """`text` with what stands between its markers replaced by the records' tables. Raises ValueError without markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the file has no {START} ... {END} markers to put the results between")
    tables = "\n\n".join(markdown(record) for record in records)
    return f"{before}{START}\n{tables}\n{END}{after}"


def main(names: Sequence[str]) -> None:
    """Rewrite the named files; without results they are left as they are."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.rglob("*.json")) if path.name != "latest.json"]
    if not records:
        print(f"no results under {RESULTS}: nothing to do", file=sys.stderr)
        return
    for name in names:
        path = Path(name)
        path.write_text(with_results(path.read_text(), records))


if __name__ == "__main__":
    main(sys.argv[1:])
