"""What `hybrid bench` found: results by batch size and precision, who is fastest, and what a reader must know of the figures.

The results are those of `bench.compare`: a dict for each runtime, which has either figures or a "gap", the reason why it has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_hybrid_backend.bench.peers import AS_WRITTEN, EAGER, FLOAT32, OURS, title
from torch_hybrid_backend.bench.worker import Facts
from torch_hybrid_backend.other_load import FELT
from torch_hybrid_backend.report.share import DISTURBED

Result = Mapping[str, Any]
_AS_WRITTEN = "as-written"  # what `FLOAT32` is called here: the model may be in another dtype
_EQUAL = 0.02  # medians that are this near to each other are called equal
_NOT_IN_FILES = ("samples_ms", "threads", "day")


@dataclass(frozen=True, slots=True)
class Group:
    """The results of one batch size (None: that of the factory's inputs) and one precision."""

    batch: int | None
    precision: str
    facts: Facts
    results: Sequence[Result]
    training: bool = False

    @property
    def title(self) -> str:
        """For example "batch 8, bf16"."""
        return group_title(self.batch or self.facts.batch, self.precision)

    @property
    def measured(self) -> list[Result]:
        """The results that have figures, the fastest first."""
        return sorted((each for each in self.results if "gap" not in each), key=lambda each: float(each["median_ms"]))

    def of(self, peer: str) -> Result | None:
        """The figures of one runtime; None where it has none."""
        return next((each for each in self.measured if each["peer"] == peer), None)

    def speedup(self, result: Result) -> float | None:
        """How many times as fast as eager, as written, it is; None without eager's figures."""
        eager = self.of(EAGER) if self.precision == FLOAT32 else self.of(AS_WRITTEN.name)
        return None if eager is None else float(eager["median_ms"] / result["median_ms"])

    @property
    def verdicts(self) -> list[str]:
        """Who is faster than hybrid, and by how much; or by how much hybrid is ahead."""
        ours = self.of(OURS)
        if ours is None:
            return ["hybrid has no result, so nothing can be compared with it."]
        others = [each for each in self.measured if each is not ours]
        if not others:
            return ["No other runtime has a result."]
        ratios = {title(each["peer"]): float(each["median_ms"] / ours["median_ms"]) for each in others}
        ahead = {name: ratio for name, ratio in ratios.items() if ratio < 1 - _EQUAL}
        found = [f"{name} is faster: hybrid has {_times(ratio)} its speed." for name, ratio in ahead.items()]
        found += [f"{name} and hybrid are equally fast." for name, r in ratios.items() if abs(r - 1) <= _EQUAL]
        beaten = [f"{_times(ratio)} {name}" for name, ratio in ratios.items() if ratio > 1 + _EQUAL]
        if beaten:
            found.append(f"hybrid is {'faster than the others' if found else 'fastest'}: {'; '.join(beaten)}.")
        return found

    @property
    def gaps(self) -> list[str]:
        """Why runtimes have no figures, a line each."""
        return [f"{title(each['peer'])}: {each['gap']}" for each in self.results if "gap" in each]

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the figures."""
        found = []
        if self.facts.is_random:
            found.append("The model draws random numbers, so results were not compared with eager's.")
        if self.facts.was_training and not self.training:
            found.append("The model is in training mode: to measure inference, have the factory return model.eval().")
        disturbed = [title(each["peer"]) for each in self.measured if each["other_load"] > FELT]
        if disturbed:
            which = "; ".join(disturbed) if len(disturbed) < len(self.measured) else "all runtimes"
            found.append(f"{which}: {DISTURBED}. Measure again when nothing else runs on the machine.")
        return found


def group_title(batch: int | None, precision: str) -> str:
    """For example "batch 8, bf16"."""
    return ", ".join(filter(None, ("" if batch is None else f"batch {batch}", precision_title(precision))))


def precision_title(precision: str) -> str:
    """The name of a precision on the command line and in files."""
    return _AS_WRITTEN if precision == FLOAT32 else precision


@dataclass(slots=True)
class Record:
    """Everything that a run found. `target`: the factory; `training`: whether steps of training were timed."""

    target: str
    training: bool
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    groups: list[Group] = field(default_factory=list)

    @property
    def what(self) -> str:
        """What was timed."""
        return "training step (forward, backward, SGD)" if self.training else "inference"

    @property
    def setup(self) -> str:
        """The processor, threads, versions and day, in one line."""
        about = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        return f"{about['cpu']}, {about['threads']} threads, {about['capability']}; {versions}; {about['day']}"

    def as_json(self) -> dict[str, Any]:
        """{"target", "what", "machine", "settings", "results": one dict for each row, "groups": verdicts and notes}: no NaN and no infinity."""
        results = [
            _finite({key: value for key, value in each.items() if key not in _NOT_IN_FILES})
            | {"batch": group.batch or group.facts.batch, "precision": precision_title(group.precision)}
            | ({} if "gap" in each else {"speedup": _rounded(group.speedup(each))})
            for group in self.groups
            for each in group.results
        ]
        groups = [
            {"title": group.title, "verdicts": group.verdicts, "notes": group.notes, "missing": group.gaps}
            for group in self.groups
        ]
        return {
            "target": self.target,
            "what": self.what,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "results": results,
            "groups": groups,
        }


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _finite(result: Result) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
