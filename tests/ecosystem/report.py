"""Outcomes of the catalogue as a page: `python -m tests.ecosystem.report` writes docs/ecosystem.md from every recorded ecosystem.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS
from tests.ecosystem.catalogue import find, images

VERDICTS = ("right", "wrong", "raises", "slower")
_PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
# Two timings of one function differ by so much on a quiet machine: less is not "slower".
_NOISE = 0.03

_ABOUT = """
Made by `make ecosystem`; do not edit. The models stand in `tests/ecosystem/catalogue/`: architectures of the libraries at reduced width
and depth, random weights. timm's were drawn by seed {seed}, each from another file of the library, and have their published size.

Each ran in a process of its own with an empty cache: three calls with different inputs (graphs, bags and texts of other sizes too), each
compared with eager and, where they differ, with float64; "right" is what `torch._dynamo.utils.same` says. "Speed over eager": medians of
interleaved rounds, above 1 is faster. "Compile s": what the three calls took beyond steady ones, recompilations for sizes that vary
included. "Graphs": compiled by the backend; more than one where Dynamo cuts the model, or compiles it again for other sizes. "Operators
compiled": the share that engines run; eager runs the rest.
""".strip()

Entry = Mapping[str, Any]


def verdict(entry: Entry) -> str:
    """One of VERDICTS; the worst that is true."""
    if "raises" in entry:
        return "raises"
    if entry["wrong"]:
        return "wrong"
    return "slower" if (speed(entry) or 1.0) < 1.0 - _NOISE else "right"


def speed(entry: Entry) -> float | None:
    """Eager's time over ours; None where it was not timed."""
    return entry["eager_ms"] / entry["hybrid_ms"] if entry.get("hybrid_ms") else None


def unexplained(entry: Entry) -> bool:
    """Whether the entry needs a reason that the catalogue does not give: for its verdict, or for a warning of the backend."""
    case = find(entry["name"])
    return bool(case.unexplained(entry.get("faults", ()))) or (verdict(entry) != "right" and not case.reason)


def brief(entry: Entry) -> str:
    """One line for who watches the run."""
    ratio = speed(entry)
    parts = [verdict(entry), entry.get("raises") or entry.get("wrong") or ""]
    if ratio is not None:
        parts.append(f"{ratio:.2f} times eager's speed ({entry['eager_ms']:.3g} ms, {entry['hybrid_ms']:.3g} ms)")
    if "raises" not in entry:
        parts.append(f"compiled in {entry['compile_s']:.0f} s")
        parts += [f"{entry['graphs']} graphs", f"{entry['in_regions']} of {entry['operators']} operators compiled"]
        parts += [f"warned: {fault}" for fault in entry["faults"]]
    return ", ".join(filter(None, parts))


def table(entries: Sequence[Entry]) -> str:
    """Markdown: a row for each model, and what they come to."""
    lines = [
        "| model | parameters, M | result | speed over eager | eager ms | compile s | graphs | operators compiled | remarks |",
        "|---|---:|---|---:|---:|---:|---:|---:|---|",
        *map(_row, entries),
        "",
        _summary(entries),
    ]
    return "\n".join(lines)


def _row(entry: Entry) -> str:
    reason = find(entry["name"]).reason
    if "raises" in entry:
        return f"| {entry['name']} | | raises | | | | | | {reason or _cell(entry['raises'])} |"
    ratio = speed(entry)
    remarks = [reason, "" if reason else entry["wrong"], *([] if reason else entry["faults"])]
    cells = (
        entry["name"],
        f"{entry['parameters'] / 1e6:.1f}",
        "wrong" if entry["wrong"] else "right",
        "" if ratio is None else f"{ratio:.2f}",
        "" if ratio is None else f"{entry['eager_ms']:.3g}",
        f"{entry['compile_s']:.1f}",
        str(entry["graphs"]),
        f"{entry['in_regions'] / entry['operators']:.0%}" if entry["operators"] else "",
        _cell("; ".join(filter(None, remarks))),
    )
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _summary(entries: Sequence[Entry]) -> str:
    counts = {kind: sum(verdict(entry) == kind for entry in entries) for kind in VERDICTS}
    text = f"{len(entries)} models: " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    ratios = [ratio for ratio in map(speed, entries) if ratio is not None]
    if ratios:
        text += f". Geometric mean of the speed over eager: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}"
    return text + "."


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """The whole document."""
    parts = [
        "# Models of other libraries",
        _ABOUT.format(seed=images.SEED),
    ]
    if not records:
        parts.append("No run is recorded yet.")
    for record in records:
        about = record["machine"]
        versions = {**about["versions"], **record["libraries"]}
        libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
        days = sorted({entry["day"] for entry in record["models"]})
        revisions = ", ".join(dict.fromkeys(entry["revision"] for entry in record["models"]))
        parts.append(
            f"## {about['cpu']} (family/model {about['cpu_model']}), {about['cores']} cores, {about['threads']} threads,"
            f" {about['capability']}\n\n"
            f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, revision {revisions}; {libraries}."
        )
        parts.append(table(record["models"]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Rewrite the page."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.rglob("ecosystem.json"))]
    _PAGE.write_text(page(records))


if __name__ == "__main__":
    main()
