"""A record as Markdown tables: printed by the runner, and put into the documentation.

python -m benchmarks.table README.md docs/benchmarks.md        # from every zoo.json under benchmarks/results/
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

# One row for each kind of model, and the row that does worst.
SUMMARY = (
    ("resnet50", 1),
    ("mobilenet_v2", 1),
    ("efficientnet_b0", 1),
    ("convnext_tiny", 1),
    ("unet", 1),
    ("bert_base", 1),
    ("gpt2", 1),
    ("vit_b16", 1),
    ("resnet50", 8),
    ("llama_small", 8),
)
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


def summary(record: Record) -> str:
    """The rows of `SUMMARY` with eager, hybrid and the fastest other peer; then our standing against the best of all rows."""
    body = []
    for model, batch in SUMMARY:
        times = results.medians(record, (model, batch))
        others: dict[str, float] = {name: time for name, time in times.items() if name not in (OURS, "eager")}
        best = min(others, key=lambda name: others[name], default=None)
        own, eager = times.get(OURS), times.get("eager")
        fastest = "-" if best is None else f"{_title(best)} {_milliseconds(others[best])}"
        cells = [
            _milliseconds(eager),
            _milliseconds(own),
            fastest,
            _ratio(eager, own),
            _ratio(results.best(times), own),
        ]
        body.append([_model(model), str(batch), *cells])
    header = ["model", "batch", "eager ms", "hybrid ms", "fastest other ms", "eager / hybrid", "other / hybrid"]
    about, overall = record["machine"], results.standing(record, None)
    caption = (
        f"{about['cpu']}, {about['cores']} cores, {about['capability']}, float32, {_when(record)}; medians. "
        f"Over all {overall.rows} rows the fastest other peer takes {_number(overall.ratio, '{:.2f}')} times hybrid's time "
        f"(geometric mean), and hybrid is ahead in {_number(overall.ahead, '{:.0%}')} of them."
    )
    return f"{_table(header, body, left=1)}\n\n{caption}"


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


_FORMS = {"summary": summary, "benchmarks": latency}


def with_results(text: str, records: Sequence[Mapping[str, Any]]) -> str:
    """`text` with the records' tables in place of what stands between `<!-- NAME:start -->` and `<!-- NAME:end -->`, NAME being summary or
    benchmarks. Raises ValueError where the text has neither pair."""
    found = False
    for name, form in _FORMS.items():
        before, start, rest = text.partition(f"<!-- {name}:start -->")
        _, end, after = rest.partition(f"<!-- {name}:end -->")
        if start and end:
            found = True
            tables = "\n\n".join(form(dict(record)) for record in records)
            text = f"{before}{start}\n{tables}\n{end}{after}"
    if not found:
        raise ValueError(
            f"the file has no markers to put the results between: <!-- NAME:start -->, NAME being one of {', '.join(_FORMS)}"
        )
    return text


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
