"""Figures of one operator, as kept in the file, and what is derived from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.operators.shapes import Case

OURS = "ours"
# The other sides, in the order of the tables' columns.
SIDES = ("aten", "onednn", "mkl", "inductor")
# Which operator it was, in a run: kind, title, batch, epilogue.
Key = tuple[str, str, int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """An operator: microseconds by side, or why there are none. `counts`: model -> how often it runs in one call.

    `flops` and `size_bytes` of one run; `peak_share`: of what the machine's ceilings allow for them.
    """

    kind: str
    title: str
    batch: int
    epilogue: str
    counts: tuple[tuple[str, int], ...]
    flops: float = 0.0
    size_bytes: float = 0.0
    peak_share: float = 0.0
    microseconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""

    @classmethod
    def of(cls, case: Case, epilogue: str, **found: Any) -> Result:
        """The case's, with what was found of it."""
        return cls(case.kind, case.title, case.batch, epilogue, case.counts, **found)

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Result:
        """From the file; the inverse of `row`."""
        found: dict[str, Any] = {"error": row.get("error", "")}
        if "us" in row:
            found |= {"flops": row["flops"], "size_bytes": row["bytes"], "peak_share": row["peak_share"]}
            found |= {"microseconds": row["us"]}
        counts = tuple(row["counts"].items())
        return cls(row["kind"], row["operator"], row["batch"], row["epilogue"], counts, **found)

    @property
    def key(self) -> Key:
        return self.kind, self.title, self.batch, self.epilogue

    @property
    def best_other(self) -> tuple[str, float]:
        """The fastest side beside ours, and its time."""
        return min(((k, us) for k, us in self.microseconds.items() if k != OURS), key=lambda item: item[1])

    def ratio(self, side: str = "") -> float | None:
        """Time of the side (default: the fastest other one) over ours; None where it has none."""
        other = self.microseconds.get(side) if side else self.best_other[1]
        return None if other is None else other / self.microseconds[OURS]

    def row(self) -> dict[str, Any]:
        """The result as JSON."""
        found: dict[str, Any] = {"kind": self.kind, "operator": self.title, "batch": self.batch}
        found |= {"epilogue": self.epilogue, "counts": dict(self.counts)}
        if self.error:
            return found | {"error": self.error}
        found |= {"flops": self.flops, "bytes": self.size_bytes, "peak_share": round(self.peak_share, 3)}
        return found | {"us": {side: round(us, 2) for side, us in self.microseconds.items()}}


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Some operators together: geometric means of each other side's time over ours, and of the best one's; share of operators in
    which we are at least as fast as all; geometric mean of the share of the peak."""

    operators: int
    ratios: Mapping[str, float]
    best: float
    ahead: float
    peak_share: float


def standing(results: Sequence[Result]) -> Standing:
    """Over those with times, of which there must be one. A side counts where it has a time."""
    timed = [r for r in results if not r.error]
    ratios = {side: [ratio for r in timed if (ratio := r.ratio(side)) is not None] for side in SIDES}
    best = [ratio for r in timed if (ratio := r.ratio()) is not None]
    return Standing(
        len(timed),
        {side: _geometric_mean(some) for side, some in ratios.items() if some},
        _geometric_mean(best),
        sum(ratio >= 1 for ratio in best) / len(best),
        _geometric_mean([max(r.peak_share, 1e-3) for r in timed]),
    )


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
