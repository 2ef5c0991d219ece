"""Outcomes of the catalogue as a table: `python -m tests.ecosystem.report` writes docs/ecosystem.md from every ecosystem.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS
from tests.ecosystem.catalogue import find

VERDICTS = ("right", "wrong", "raises", "slower")
_PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
# Two timings of one thing differ by so much on a quiet machine: less is not "slower".
_NOISE = 0.03

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
    """Whether the entry needs a reason that the catalogue does not give."""
    return verdict(entry) != "right" and not find(entry["name"]).reason


def brief(entry: Entry) -> str:
    """One line for who watches the run."""
    ratio = speed(entry)
    parts = [verdict(entry), entry.get("raises") or entry.get("wrong") or ""]
    if ratio is not None:
        parts.append(f"{ratio:.2f} times eager's speed ({entry['eager_ms']:.3g} ms, {entry['hybrid_ms']:.3g} ms)")
    if "raises" not in entry:
        parts.append(f"compiled in {entry['compile_s']:.0f} s")
        parts += [f"{entry['graphs']} graphs", f"{entry['in_regions']} of {entry['operators']} operators in regions"]
        parts += [f"FAULT {fault}" for fault in entry["faults"]]
    return ", ".join(filter(None, parts))


def table(entries: Sequence[Entry]) -> str:
    """Markdown: a row for each model."""
    lines = [
        "| model | parameters, M | result | speed over eager | eager ms | compile s | graphs | operators compiled | reason |",
        "|---|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_row(entry) for entry in entries]
    return "\n".join(lines)


def _row(entry: Entry) -> str:
    reason = find(entry["name"]).reason
    if "raises" in entry:
        return f"| {entry['name']} | | raises | | | | | | {reason or entry['raises']} |"
    ratio = speed(entry)
    cells = (
        entry["name"],
        f"{entry['parameters'] / 1e6:.1f}",
        "wrong" if entry["wrong"] else "right",
        "" if ratio is None else f"{ratio:.2f}",
        "" if ratio is None else f"{entry['eager_ms']:.3g}",
        f"{entry['compile_s']:.1f}",
        str(entry["graphs"]),
        f"{entry['in_regions'] / entry['operators']:.0%}" if entry["operators"] else "",
        reason,
    )
    return f"| {' | '.join(cells)} |"
