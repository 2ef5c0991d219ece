"""Results of `hybrid bench` by batch size and precision, with verdicts (which runtime is faster) and notes about the figures.

A runtime is called faster if two medians differ by more than the sum of their spreads. A spread is the distance between the quartiles of the
rounds' medians. With five rounds, this rule calls one of two equally fast runtimes faster in 5% of runs; with the larger spread alone it would
be 14% (200,000 simulated pairs of runs, normal times).

The results are those of `bench.compare`: a dict for each runtime, with either figures or a "gap", the reason why there are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_hybrid_backend.bench.peers import AS_WRITTEN, EAGER, FLOAT32, NOT_INSTALLED, OURS, title
from torch_hybrid_backend.bench.worker import Facts
from torch_hybrid_backend.measuring.other_load import FELT
from torch_hybrid_backend.report.share import DISTURBED

Result = Mapping[str, Any]
_AS_WRITTEN = "as-written"  # the title of `FLOAT32`: a user's model may be written in another dtype
_EQUAL = 0.02  # runtimes are called equally fast if their medians differ, and spread, by at most this share
_NOTICEABLE = 1.1  # if the spreads may change a ratio by a larger factor, its bound is shown instead
_NOT_IN_FILES = ("samples_ms", "threads", "day")


@dataclass(frozen=True, slots=True)
class Group:
    """Results at one batch size (None: that of the factory's inputs) and one precision."""

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
        """The figures of one runtime; None if it has no figures."""
        return next((each for each in self.measured if each["peer"] == peer), None)

    def speedup(self, result: Result) -> float | None:
        """Speed divided by that of eager as written; None if eager has no figures."""
        eager = self.of(EAGER) if self.precision == FLOAT32 else self.of(AS_WRITTEN.name)
        return None if eager is None else float(eager["median_ms"] / result["median_ms"])

    @property
    def verdicts(self) -> list[str]:
        """Sentences that compare hybrid with each other runtime: faster, slower, equally fast or not decided."""
        ours = self.of(OURS)
        if ours is None:
            return ["hybrid has no result, so nothing can be compared with it."]
        others = [each for each in self.measured if each is not ours]
        if not others:
            return ["No other runtime has a result."]
        if ours["rounds"] < 2:
            return ["not decided: one round tells nothing of the spread; leave --rounds at 5."]
        ahead, equal, undecided, beaten = [], [], [], []
        for each in others:
            name = title(each["peer"])
            apart, spread = abs(each["median_ms"] - ours["median_ms"]), each["spread_ms"] + ours["spread_ms"]
            if max(apart, spread) <= _EQUAL * ours["median_ms"]:
                equal.append(f"{name} and hybrid are equally fast")
            elif apart <= spread:
                undecided.append(f"not decided: hybrid against {name}: {_apart(each, ours)}")
            elif each["median_ms"] < ours["median_ms"]:
                ahead.append(f"{name} is faster: hybrid has {_ratio(each, ours)} its speed")
            else:
                beaten.append(f"{_ratio(each, ours)} {name}")
        found = ahead + equal + undecided
        if beaten:
            found.append(f"hybrid is {'faster than the others' if found else 'fastest'}: {'; '.join(beaten)}")
        return [f"{verdict}{', measured beside other load' if self._disturbed else ''}." for verdict in found]

    @property
    def gaps(self) -> list[str]:
        """A line for each installed runtime without figures, with the reason."""
        return [f"{title(each['peer'])}: {gap}" for each in self.results if (gap := _gap(each, is_installed=True))]

    @property
    def absent(self) -> list[tuple[str, str]]:
        """The runtimes that are not installed, each with the packages to install."""
        return [(title(each["peer"]), gap) for each in self.results if (gap := _gap(each, is_installed=False))]

    @property
    def _disturbed(self) -> list[str]:
        """The runtimes whose threads waited for a core."""
        return [title(each["peer"]) for each in self.measured if each["other_load"] > FELT]

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of the figures must know."""
        found = []
        if self.facts.is_random:
            found.append("The model draws random numbers, so results were not compared with eager's.")
        if self.facts.was_training and not self.training:
            found.append("The model is in training mode: to measure inference, have the factory return model.eval().")
        if disturbed := self._disturbed:
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
    """All results of a run. `target`: the factory. `training`: True if training steps were timed."""

    target: str
    training: bool
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    groups: list[Group] = field(default_factory=list)

    @property
    def what(self) -> str:
        """The kind of call that was timed, in words."""
        return "training step (forward, backward, SGD)" if self.training else "inference"

    @property
    def setup(self) -> str:
        """Processor, threads, versions and day in one line."""
        about = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        return f"{about['cpu']}, {about['threads']} threads, {about['capability']}; {versions}; {about['day']}"

    @property
    def absent(self) -> list[str]:
        """A line for each runtime that is not installed. If it lacks packages in some precisions only, the line names these."""
        lacking: dict[tuple[str, str], list[str]] = {}
        for group in self.groups:
            for line in group.absent:
                lacking.setdefault(line, []).append(precision_title(group.precision))
        asked = {precision_title(group.precision) for group in self.groups}
        found = []
        for (name, gap), where in lacking.items():
            only = "" if asked == set(where) else f" in {', '.join(dict.fromkeys(where))}"
            found.append(f"{name}{only}: {gap}")
        return found

    def as_json(self) -> dict[str, Any]:
        """The record as a JSON object: "target", "what", "machine", "settings", "results" (a dict for each row), "groups" (verdicts and notes).
        NaN and infinity become null."""
        results = [
            _finite({key: value for key, value in each.items() if key not in _NOT_IN_FILES})
            | {"batch": group.batch or group.facts.batch, "precision": precision_title(group.precision)}
            | ({} if "gap" in each else {"speedup": _rounded(group.speedup(each))})
            for group in self.groups
            for each in group.results
        ]
        groups = [
            {
                "title": group.title,
                "verdicts": group.verdicts,
                "notes": group.notes,
                "missing": [*group.gaps, *(f"{name}: {gap}" for name, gap in group.absent)],
            }
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


def milliseconds(value: float) -> str:
    """Milliseconds as text, for example "0.123", "1.23" or "123.5"."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _gap(result: Result, *, is_installed: bool) -> str:
    """The reason why a runtime has no figures; "" if it has some, or if it is not as `is_installed` says."""
    gap = str(result.get("gap", ""))
    return gap if gap.startswith(NOT_INSTALLED) != is_installed else ""


def _apart(result: Result, ours: Result) -> str:
    """The difference of two medians, and their spreads, in words."""
    apart = milliseconds(abs(result["median_ms"] - ours["median_ms"]))
    spreads = f"{milliseconds(ours['spread_ms'])} and {milliseconds(result['spread_ms'])}"
    return f"{apart} ms apart, with spreads of {spreads} ms"


def _ratio(result: Result, ours: Result) -> str:
    """The ratio of two medians. If the spreads change the ratio noticeably: its bound, each median half its spread nearer to the other."""
    ratio = result["median_ms"] / ours["median_ms"]
    nearer = 0.5 if ratio < 1 else -0.5
    bound = (result["median_ms"] + nearer * result["spread_ms"]) / (ours["median_ms"] - nearer * ours["spread_ms"])
    if max(ratio / bound, bound / ratio) <= _NOTICEABLE:
        return _times(ratio)
    return f"at {'most' if ratio < 1 else 'least'} {_times(bound)}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _finite(result: Result) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
