"""A record as Markdown tables: printed by the runner, and put into the README.

python -m benchmarks.table README.md        # from every zoo.json under benchmarks/results/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.catalogue import MODELS
from benchmarks.peers import by_name
from benchmarks.results import OURS, Record

START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
RESULTS = Path(__file__).parent / "results"


def report(record: Record) -> str:
    """Everything: latency and ratios, then throughput, compile times, memory, coverage, overhead, and why gaps are gaps."""
    return "\n\n".join(part for part in (latency(record), details(record), overhead(record), gaps(record)) if part)


def latency(record: Record) -> str:
    """A row per model and batch: medians in milliseconds and the best of the others over ours; then our standing against each."""
    names = results.peers(record)
    ours = OURS in names
    header = ["model", "batch", *(f"{_title(name)} ms" for name in names), *(["best / hybrid"] if ours else [])]
    body = []
    for row in results.rows(record):
        times = results.medians(record, row)
        cells = [_model(row[0]), str(row[1]), *(_milliseconds(times.get(name)) for name in names)]
        body.append([*cells, *([_ratio(results.best(times), times.get(OURS))] if ours else [])])
    parts = [_caption(record), _table(header, body, left=1)]
    if ours:
        parts.append(standings(record))
    return "\n\n".join(parts)


def standings(record: Record) -> str:
    """A row per peer, and one for the best of each model: over how many rows, geometric mean of its time over ours, share ahead."""
    others: list[str | None] = [name for name in results.peers(record) if name != OURS]
    body = []
    for name in [*others, None]:
        entry = results.standing(record, name)
        title = "the best of each row" if name is None else _title(name)
        body.append([title, str(entry.rows), _number(entry.ratio, "{:.2f}"), _number(entry.ahead, "{:.0%}")])
    return _table(["against", "rows", "geometric mean of its time / hybrid's", "hybrid ahead"], body, left=1)


_DETAILS = (
    ("median ms", "median_ms", "{:.3g}"),
    ("/ hybrid", "ratio", "{:.2f}"),
    ("p90 ms", "p90_ms", "{:.3g}"),
    ("items/s", "items_per_s", "{:.1f}"),
    ("of peak", "peak_share", "{:.0%}"),
    ("compile s, cold", "compile_cold_s", "{:.1f}"),
    ("compile s, warm", "compile_warm_s", "{:.1f}"),
    ("MiB preparing", "preparing_mib", "{:.0f}"),
    ("MiB running", "running_mib", "{:.0f}"),
    ("operators compiled", "operators_compiled", "{:.0%}"),
    ("FLOPs compiled", "flops_compiled", "{:.0%}"),
)


def details(record: Record) -> str:
    """A row per model, batch and peer with a result: all its figures, and its time over ours. Memory is the process's peak."""
    header = ["model", "batch", "peer", *(title for title, _, _ in _DETAILS)]
    body = []
    for result in record["results"]:
        if "gap" in result:
            continue
        own = results.medians(record, (result["model"], result["batch"])).get(OURS)
        derived = {"peak_share": results.peak_share(record, result), "ratio": own and result["median_ms"] / own}
        figures = {**result, **derived}
        cells = [_number(figures.get(key), form) for _, key, form in _DETAILS]
        body.append([_model(result["model"]), str(result["batch"]), _title(result["peer"]), *cells])
    return _table(header, body, left=3) if body else ""


def overhead(record: Record) -> str:
    """What a call costs that has next to nothing to compute, in microseconds."""
    body = []
    for entry in record.get("overhead", []):
        if "gap" not in entry:
            cells = (_number(entry.get(key), "{:.1f}") for key in ("call_us", "beyond_guards_us"))
            body.append([_title(entry["peer"]), *cells])
    if not body:
        return ""
    header = ["ten operators on 4 numbers", "us a call", "of these beyond Dynamo's guards"]
    return _table(header, body, left=1)


def gaps(record: Record) -> str:
    """Why a peer has no figures: one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for result in record["results"]:
        if "gap" in result:
            reasons.setdefault(f"{_title(result['peer'])}: {result['gap']}", []).append(
                f"{_model(result['model'])} {result['batch']}"
            )
    return "\n".join(f"- {reason} ({', '.join(where)})" for reason, where in reasons.items())


def _caption(record: Record) -> str:
    about = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    peak = about.get("peak_gflops")
    measured = f", FMA peak {peak:.0f} GFLOP/s measured" if peak else ""
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, {about['capability']}{measured}; float32; "
        f"{versions}; {_when(record)}. Median of one call in milliseconds; a ratio above 1 means that hybrid is faster."
    )


def _when(record: Record) -> str:
    """The days on which the rows were measured, and the revisions of this project."""
    days = sorted({result.get("day", record["machine"]["day"]) for result in record["results"]})
    revisions = dict.fromkeys(result.get("revision") or "unknown" for result in record["results"])
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, revision {', '.join(revisions)}" if days else ""


def _table(header: Sequence[str], body: Sequence[Sequence[str]], left: int) -> str:
    """Markdown whose columns line up in a terminal too; the first `left` ones are text, the rest figures."""
    widths = [max(3, *map(len, column)) for column in zip(header, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if index < left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, body)])


def _model(name: str) -> str:
    return MODELS[name].title if name in MODELS else name


def _title(name: str) -> str:
    known = by_name()
    return known[name].title if name in known else name


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _ratio(other: float | None, own: float | None) -> str:
    return "-" if other is None or own is None else f"{other / own:.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def with_results(text: str, records: Sequence[Mapping[str, Any]]) -> str:
    """`text` with what stands between its markers replaced by the records' tables. Raises ValueError without markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"the file has no {START} ... {END} markers to put the results between")
    tables = "\n\n".join(latency(dict(record)) for record in records)
    return f"{before}{START}\n{tables}\n{END}{after}"


def main(names: Sequence[str]) -> None:
    """Rewrite the named files; without results they are left as they are."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.rglob("zoo.json"))]
    if not records:
        print(f"no results under {RESULTS}: nothing to do", file=sys.stderr)
        return
    for name in names:
        path = Path(name)
        path.write_text(with_results(path.read_text(), records))


if __name__ == "__main__":
    main(sys.argv[1:])
