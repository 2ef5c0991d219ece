"""The record of a run: what it holds, what is derived from it, and the file it is kept in.

    {"machine": {...}, "settings": {...}, "overhead": [...], "results": [...], "summary": {...}}

`results` are those of `benchmarks.compare`, one for each model, batch and peer; a result without figures has a "gap", which says why.
Each has its precision (older ones are all float32), and the day and the revision of this project it was measured on, since rows are
measured anew one by one.
`overhead` are the costs of a call with next to no work in it (`benchmarks.overhead`). `summary` is derived, for those who read the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_hybrid_backend.bench.peers import BASELINES, FLOAT32, OURS

Record = dict[str, Any]
Row = tuple[str, int]  # model, batch
_BASELINES = frozenset(peer.name for peer in BASELINES)


@dataclass(frozen=True, slots=True)
class Standing:
    """Ours against one peer (or the best of each row), over the rows in which both have a result.

    `ratio`: geometric mean of the peer's median over ours, above 1 where we are faster; None without rows. `ahead`: share of rows in
    which we are at least as fast.
    """

    rows: int
    ratio: float | None
    ahead: float | None


def processor(record: Record) -> str:
    """The processor of the record: the marketing name, with x86's family and model where the record has them."""
    about = record["machine"]
    model = about.get("cpu_model", "").strip("/")
    return f"{about['cpu']} (family/model {model})" if model else str(about["cpu"])


def rows(record: Record) -> list[Row]:
    """Models and batches, in the order in which they were run."""
    return list(dict.fromkeys((result["model"], result["batch"]) for result in record["results"]))


def peers(record: Record) -> list[str]:
    """The names of all peers that were asked."""
    return list(dict.fromkeys(result["peer"] for result in record["results"]))


def medians(record: Record, row: Row) -> dict[str, float]:
    """Milliseconds of one call of each peer that has a result."""
    return {
        result["peer"]: result["median_ms"]
        for result in record["results"]
        if (result["model"], result["batch"]) == row and "median_ms" in result
    }


def errors(record: Record, row: Row) -> dict[str, float]:
    """The errors of results against eager's in float32 (`rms_error`), of each peer that was asked for another precision."""
    return {
        result["peer"]: result["rms_error"]
        for result in record["results"]
        if (result["model"], result["batch"]) == row
        and result.get("precision", FLOAT32) != FLOAT32
        and result.get("rms_error") is not None
    }


def others(times: Mapping[str, float]) -> dict[str, float]:
    """Peers that are not ours and were asked for the same precision."""
    return {peer: ms for peer, ms in times.items() if peer != OURS and peer not in _BASELINES}


def best(times: Mapping[str, float]) -> float | None:
    """The fastest of the others."""
    return min(others(times).values(), default=None)


def precision(record: Record) -> str:
    """The precision that the peers were asked for: one of `PRECISIONS`."""
    return str(record.get("settings", {}).get("precision", FLOAT32))


def standing(record: Record, peer: str | None) -> Standing:
    """Ours against `peer`, which may be a baseline; None stands for the best peer of each row."""
    ratios = []
    for row in rows(record):
        times = medians(record, row)
        other = best(times) if peer is None else times.get(peer)
        if other is not None and OURS in times:
            ratios.append(other / times[OURS])
    if not ratios:
        return Standing(0, None, None)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return Standing(len(ratios), mean, sum(ratio >= 1 for ratio in ratios) / len(ratios))


def peak_share(record: Record, result: Mapping[str, Any]) -> float | None:
    """Floating-point operations per second over the machine's measured peak in the record's precision; None where either is unknown.

    Above 1 is possible: algorithms such as Winograd's do with fewer operations than are counted here.
    """
    peak = record["machine"].get("peak_gflops")
    if not peak or "median_ms" not in result or result["peer"] in _BASELINES:
        return None
    return float(result["gflop"] / result["median_ms"] * 1e3 / peak)


def summary(record: Record) -> dict[str, Any]:
    """Ours against each peer and against the best one; and every row's share of the peak."""
    standings = {name: standing(record, name) for name in peers(record) if name != OURS}
    standings["best"] = standing(record, None)
    return {
        name: {
            "rows": entry.rows,
            "geometric_mean": None if entry.ratio is None else round(entry.ratio, 4),
            "share_ahead": None if entry.ahead is None else round(entry.ahead, 4),
        }
        for name, entry in standings.items()
    }


def write(path: Path, record: Record) -> None:
    """Replace the file in one step: a run that is stopped leaves the last complete one. Single samples are not kept."""
    results = [{key: value for key, value in r.items() if key != "samples_ms"} for r in record["results"]]
    for result in results:
        if (share := peak_share(record, result)) is not None:
            result["peak_share"] = round(share, 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record | {"results": results, "summary": summary(record)}, indent=1) + "\n")
    os.replace(new, path)


def resumed(path: Path, fresh: Record) -> Record:
    """`fresh` with what an earlier run left in the file. Raises ValueError where that run's machine or settings were others."""
    if not path.exists():
        return fresh
    found: Record = json.loads(path.read_text())
    for part in ("machine", "settings"):
        # Of the machine: what decides times, and the day a run is resumed on does not.
        ours, theirs = ({k: v for k, v in r[part].items() if k not in ("day", "peak_gflops")} for r in (fresh, found))
        differing = sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
        if differing:
            raise ValueError(
                f"{path} was made with another {', '.join(differing)}; choose another file, or leave out --resume"
            )
    return found


def replaced(record: Record, row: Row, found: Sequence[dict[str, Any]]) -> Record:
    """The record with one row's results instead of those it had, in their place; a new row comes last."""
    kept = [r for r in record["results"] if (r["model"], r["batch"]) != row]
    before = [r for r in record["results"] if (r["model"], r["batch"]) == row]
    place = record["results"].index(before[0]) if before else len(kept)
    return record | {"results": [*kept[:place], *found, *kept[place:]]}


def complete(record: Record, row: Row, wanted: Sequence[str]) -> bool:
    """True if the row has a result, or a gap, for every peer wanted."""
    there = {r["peer"] for r in record["results"] if (r["model"], r["batch"]) == row}
    return there >= set(wanted)
