"""The results of a task: its samples' outcomes in one mode, counted."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.operators.execution import ERROR, PASSED, SKIPPED, UPSTREAM, WRONG, Outcome
from tests.operators.tasks import Task

CRASHED, HUNG = "crashed", "hung"
FAILURES = (WRONG, ERROR, CRASHED, HUNG)
_MAX_FAILURES = 20  # kept with their reasons


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine refused an ATen operator, in `samples` of a task's samples."""

    operator: str
    code: str
    why: str
    samples: int

    @property
    def matters(self) -> bool:
        """Views alone in a region are left to eager by the partitioner, what has no elements by every engine."""
        return self.operator != "getitem" and self.code != "too_small" and "no elements" not in self.why


@dataclass(frozen=True, slots=True)
class Row:
    """A task in one mode. Available: how many samples the task has; `samples` of them were run.
    statuses: status -> samples. shares: how the engine took the samples that passed, -> samples: "taken" (every operator of the graph),
    "partly", "refused" (it was offered operators and took none), "none" (nothing to compute: views, or no elements).
    failures: (sample, status, why) of the first.
    """

    subject: str
    kind: str
    mode: str
    available: int
    statuses: Mapping[str, int]
    shares: Mapping[str, int]
    refusals: tuple[Refusal, ...]
    failures: tuple[tuple[int, str, str], ...]

    @staticmethod
    def of(task: Task, mode: str, available: int, outcomes: Mapping[int, Outcome]) -> Row:
        """The row of a task's outcomes by sample number."""
        refusals: collections.Counter[tuple[str, str, str]] = collections.Counter()
        shares: collections.Counter[str] = collections.Counter()
        failures = []
        for number, outcome in sorted(outcomes.items()):
            refusals.update(outcome.refused)
            if outcome.status == PASSED:
                shares[_share(outcome)] += 1
            elif outcome.status != SKIPPED:
                failures.append((number, outcome.status, outcome.why))
        failures.sort(key=lambda failure: failure[1] == UPSTREAM)
        statuses = dict(collections.Counter(outcome.status for outcome in outcomes.values()))
        refused = tuple(Refusal(*what, samples) for what, samples in sorted(refusals.items()))
        return Row(
            task.subject, task.kind, mode, available, statuses, dict(shares), refused, tuple(failures[:_MAX_FAILURES])
        )

    @property
    def name(self) -> str:
        return f"{self.subject} {self.kind}"

    @property
    def samples(self) -> int:
        return sum(self.statuses.values())

    @property
    def failure(self) -> str:
        """The first failure, as "sample 3: wrong: why"; "" where there is none."""
        for number, status, why in self.failures:
            if status in FAILURES:
                return f"sample {number}: {status}: {why}"
        return ""

    @property
    def verdict(self) -> str:
        """The way the engine took the task: "wrong", "taken", "partly", "refused", "none", or "upstream" or "skipped" where nothing passed."""
        if self.failure:
            return "wrong"
        shares = {share for share, samples in self.shares.items() if samples}
        if not shares:
            return UPSTREAM if self.statuses.get(UPSTREAM) else SKIPPED
        shares -= {"none"}
        if not shares:
            return "none"
        return shares.pop() if len(shares) == 1 else "partly"

    @property
    def code(self) -> str:
        """The code of most refusals that matter, "" without any."""
        counts: collections.Counter[str] = collections.Counter()
        for refusal in self.refusals:
            if refusal.matters:
                counts[refusal.code] += refusal.samples
        return counts.most_common(1)[0][0] if counts else ""


def _share(outcome: Outcome) -> str:
    refused = any(Refusal(*refusal, 1).matters for refusal in outcome.refused)
    if outcome.taken:
        return "partly" if refused else "taken"
    return "refused" if refused else "none"


class Journal:
    """Rows on disk, one a line, as they come; the last one of a name and mode counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[tuple[str, str], Row] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._keep(_from_wire(json.loads(line)))

    def add(self, row: Row) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        self._keep(row)

    def _keep(self, row: Row) -> None:
        self.rows[row.name, row.mode] = row


def _from_wire(data: dict[str, Any]) -> Row:
    refusals = tuple(Refusal(**refusal) for refusal in data["refusals"])
    failures = tuple((int(number), str(status), str(why)) for number, status, why in data["failures"])
    data.setdefault("available", sum(data["statuses"].values()))
    return Row(**{**data, "refusals": refusals, "failures": failures})


def outcome_to_wire(outcome: Outcome) -> dict[str, object]:
    """An outcome as JSON values."""
    return dataclasses.asdict(outcome)


def outcome_from_wire(data: Mapping[str, Any]) -> Outcome:
    """The inverse of `outcome_to_wire`."""
    refused: Sequence[Any] = data["refused"]
    return Outcome(data["status"], data["why"], data["taken"], tuple((o, c, w) for o, c, w in refused))
