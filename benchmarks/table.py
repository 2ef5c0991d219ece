"""A record as Markdown tables: printed by the runner, and put into the documentation.

python -m benchmarks.table README.md docs/benchmarks.md docs/precision.md     # from every zoo*.json under benchmarks/results/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.catalogue import MODELS
from benchmarks.results import OURS, Record
from torch_hybrid_backend.bench.peers import FLOAT32, title
from torch_hybrid_backend.bench.record import milliseconds
from torch_hybrid_backend.bench.table import markdown

# One row for each kind of model, at batch 1.
SUMMARY = tuple(
    (name, 1)
    for name in (
        "resnet50",
        "mobilenet_v2",
        "efficientnet_b0",
        "convnext_tiny",
        "unet",
        "bert_base",
        "gpt2",
        "vit_b16",
    )
)
RESULTS = Path(__file__).parent / "results"


def report(record: Record) -> str:
    """Everything: latency and ratios, then throughput, compile times, memory, coverage, overhead, what ran, and why gaps are gaps."""
    parts = (latency(record), details(record), overhead(record), executed(record), gaps(record))
    return "\n\n".join(part for part in parts if part)


def latency(record: Record) -> str:
    """A row per model and batch: medians in milliseconds, below float32 with how far results are off, and the best of the others over ours;
    then our standing against each."""
    names = results.peers(record)
    ours = OURS in names
    header = ["model", "batch", *(f"{title(name)} ms" for name in names), *(["best / hybrid"] if ours else [])]
    body = []
    for row in results.rows(record):
        times, errors = results.medians(record, row), results.errors(record, row)
        cells = [_model(row[0]), str(row[1]), *(_milliseconds(times.get(name), errors.get(name)) for name in names)]
        body.append([*cells, *([_ratio(results.best(times), times.get(OURS))] if ours else [])])
    parts = [_caption(record), markdown(header, body, left=1)]
    if ours:
        parts.append(standings(record))
    return "\n\n".join(parts)


def summary(record: Record) -> str:
    """A row for each of `SUMMARY` that the record has, a column for each peer: milliseconds. Then when and where they were measured."""
    names = [name for name in results.peers(record) if name != OURS]
    body = []
    for row in SUMMARY:
        times = results.medians(record, row)
        if not times:
            continue
        own = times.get(OURS)
        shown = [_milliseconds(times.get(name)) for name in (OURS, *names)]
        body.append([_model(row[0]), *shown, _ratio(times.get("eager"), own), _ratio(results.best(times), own)])
    header = ["model", *map(title, (OURS, *names)), "eager / hybrid", "fastest other / hybrid"]
    about = record["machine"]
    caption = (
        f"Milliseconds of one call (median), batch 1, float32. {results.processor(record)}, {about['cores']} cores, "
        f"{about['capability']}; {_when(record)}."
    )
    return f"{markdown(header, body, left=1)}\n\n{caption}"


def standings(record: Record) -> str:
    """A row per peer, and one for the best of each model: over how many rows, geometric mean of its time over ours, share ahead."""
    others: list[str | None] = [name for name in results.peers(record) if name != OURS]
    body = []
    for name in [*others, None]:
        entry = results.standing(record, name)
        against = "the best of each row" if name is None else title(name)
        body.append([against, str(entry.rows), _number(entry.ratio, "{:.2f}"), _number(entry.ahead, "{:.0%}")])
    return markdown(["against", "rows", "geometric mean of its time / hybrid's", "hybrid ahead"], body, left=1)


_DETAILS = (
    ("median ms", "median_ms", "{:.3g}"),
    ("/ hybrid", "ratio", "{:.2f}"),
    ("p90 ms", "p90_ms", "{:.3g}"),
    ("error", "rms_error", "{:.1e}"),
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
    header = ["model", "batch", "peer", *(name for name, _, _ in _DETAILS)]
    body = []
    for result in record["results"]:
        if "gap" in result:
            continue
        own = results.medians(record, (result["model"], result["batch"])).get(OURS)
        derived = {"peak_share": results.peak_share(record, result), "ratio": own and result["median_ms"] / own}
        figures = {**result, **derived}
        cells = [_number(figures.get(key), form) for _, key, form in _DETAILS]
        body.append([_model(result["model"]), str(result["batch"]), title(result["peer"]), *cells])
    return markdown(header, body, left=3) if body else ""


def overhead(record: Record) -> str:
    """The cost of a call that has next to nothing to compute, in microseconds."""
    body = []
    for entry in record.get("overhead", []):
        if "gap" not in entry:
            cells = (_number(entry.get(key), "{:.1f}") for key in ("call_us", "beyond_guards_us"))
            body.append([title(entry["peer"]), *cells])
    if not body:
        return ""
    header = ["ten operators on 4 numbers", "us a call", "of these beyond Dynamo's guards"]
    return markdown(header, body, left=1)


def gaps(record: Record) -> str:
    """The reasons why a peer has no figures: one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for result in record["results"]:
        if "gap" in result:
            reasons.setdefault(f"{title(result['peer'])}: {result['gap']}", []).append(
                f"{_model(result['model'])} {result['batch']}"
            )
    return _lines(reasons)


def executed(record: Record) -> str:
    """The precisions that peers say they computed in: one line for each answer. Nothing where float32 was asked for."""
    if results.precision(record) == FLOAT32:
        return ""
    answers: dict[str, list[str]] = {}
    for result in record["results"]:
        if counts := result.get("executed"):
            told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            answers.setdefault(f"{title(result['peer'])} ran {told}", []).append(
                f"{_model(result['model'])} {result['batch']}"
            )
    return _lines(answers)


def _lines(places: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f"- {text} ({', '.join(where)})" for text, where in places.items())


def _caption(record: Record) -> str:
    about = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    peak = about.get("peak_gflops")
    precision = results.precision(record)
    what = "FMA peak" if precision == FLOAT32 else "peak"
    measured = f", {what} {peak:.0f} GFLOP/s measured" if peak else ""
    error = (
        ""
        if precision == FLOAT32
        else " In brackets: root mean square of the difference from eager in float32, over eager's."
    )
    return (
        f"{results.processor(record)}, {about['cores']} cores, {about['threads']} threads, {about['capability']}{measured}; {precision}; "
        f"{versions}; {_when(record)}. Median of one call in milliseconds; a ratio above 1 means that hybrid is faster.{error}"
    )


def _when(record: Record) -> str:
    """The days on which the rows were measured, and the revisions of this project."""
    days = sorted({result.get("day", record["machine"]["day"]) for result in record["results"]})
    revisions = dict.fromkeys(result.get("revision") or "unknown" for result in record["results"])
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, revision {', '.join(revisions)}" if days else ""


def _model(name: str) -> str:
    return MODELS[name].title if name in MODELS else name


def _milliseconds(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "-"
    return milliseconds(value) if error is None else f"{milliseconds(value)} ({error:.1%})"


def _ratio(other: float | None, own: float | None) -> str:
    return "-" if other is None or own is None else f"{other / own:.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


# Name of a pair of markers -> the table between them, and whether it is of records in float32 or of the others.
_FORMS = {"summary": (summary, True), "benchmarks": (latency, True), "precisions": (latency, False)}


def with_results(text: str, records: Sequence[Mapping[str, Any]]) -> str:
    """`text` with the records' tables in place of what stands between `<!-- NAME:start -->` and `<!-- NAME:end -->`, NAME being summary or
    benchmarks (records in float32), or precisions (the others). What has no record stays. Raises ValueError where the text has no pair."""
    found = False
    for name, (form, is_float32) in _FORMS.items():
        before, start, rest = text.partition(f"<!-- {name}:start -->")
        _, end, after = rest.partition(f"<!-- {name}:end -->")
        if start and end:
            found = True
            chosen = [dict(r) for r in records if (results.precision(dict(r)) == FLOAT32) == is_float32]
            tables = [form(record) for record in (_for_the_summary(chosen) if form is summary else chosen)]
            if tables:
                text = "\n".join((before + start, "\n\n".join(tables), end + after))
    if not found:
        raise ValueError(
            f"the file has no markers to put the results between: <!-- NAME:start -->, NAME being one of {', '.join(_FORMS)}"
        )
    return text


def _for_the_summary(records: Sequence[Record]) -> list[Record]:
    """The record with the most cells of the summary, of equals the newest; none where no record has any."""

    def cells(record: Record) -> int:
        return sum(len(results.medians(record, row)) for row in SUMMARY)

    def day(record: Record) -> str:
        return max(result.get("day", record["machine"]["day"]) for result in record["results"])

    able = [record for record in records if cells(record)]
    return [max(able, key=lambda record: (cells(record), day(record)))] if able else []


def main(names: Sequence[str]) -> None:
    """Rewrite the named files; without results they are left as they are."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.rglob("zoo*.json"))]
    if not records:
        print(f"no results under {RESULTS}: nothing to do", file=sys.stderr)
        return
    for name in names:
        path = Path(name)
        path.write_text(with_results(path.read_text(), records))


if __name__ == "__main__":
    main(sys.argv[1:])
