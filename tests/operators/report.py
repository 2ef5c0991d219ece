"""The results of a run: what each operator came to, totals by dtype, as JSON and as text."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.operators.execution import ERROR, PASSED, SKIPPED, UPSTREAM, WRONG, Outcome

CRASHED, HUNG = "crashed", "hung"
FAILURES = (WRONG, ERROR, CRASHED, HUNG)


@dataclass(frozen=True, slots=True)
class Row:
    """One task: an operator or module in one dtype. `outcomes` are its samples', in order."""

    subject: str
    kind: str  # "float32", "float32 backward", "float32 train"
    outcomes: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        return f"{self.subject} {self.kind}"

    @property
    def failure(self) -> str:
        """The first failure, as "sample 3: wrong: why"; "" where there is none."""
        for position, outcome in enumerate(self.outcomes):
            if outcome.status in FAILURES:
                return f"sample {position}: {outcome.status}: {outcome.why}"
        return ""

    @property
    def verdict(self) -> str:
        """How the engine took it: "wrong", "taken", "partly", "refused", "eager" (no operator was compiled) or "skipped"."""
        if self.failure:
            return "wrong"
        ran = [outcome for outcome in self.outcomes if outcome.status == PASSED]
        if not ran:
            return "upstream" if any(outcome.status == UPSTREAM for outcome in self.outcomes) else "skipped"
        taken = any(outcome.taken for outcome in ran)
        # Copies and views alone in a region are left to eager by the partitioner, and samples without elements by every engine.
        refused = any(_matters(refusal) for outcome in ran for refusal in outcome.refused)
        if taken:
            return "partly" if refused else "taken"
        return "refused" if any(outcome.refused for outcome in ran) else "eager"

    @property
    def refusals(self) -> list[tuple[str, str, str]]:
        """The distinct refusals of all samples: (operator, code, sentence)."""
        return sorted({refusal for outcome in self.outcomes for refusal in outcome.refused})


def _matters(refusal: tuple[str, str, str]) -> bool:
    operator, code, why = refusal
    return operator != "getitem" and code != "too_small" and "no elements" not in why


def totals(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """kind -> verdict -> how many tasks, and how many samples ran and failed."""
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = table.setdefault(row.kind, collections.Counter())
        counts[row.verdict] += 1
        counts["samples"] += len(row.outcomes)
        counts["failed samples"] += sum(outcome.status in FAILURES for outcome in row.outcomes)
        counts["skipped samples"] += sum(outcome.status in (SKIPPED, UPSTREAM) for outcome in row.outcomes)
    return table


def refusal_codes(rows: Iterable[Row]) -> dict[str, dict[str, list[str]]]:
    """code -> ATen operator -> the tasks in which it was refused for that."""
    table: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for operator, code, _why in filter(_matters, row.refusals):
            names = table.setdefault(code, {}).setdefault(operator, [])
            if row.name not in names:
                names.append(row.name)
    return table


COLUMNS = ("taken", "partly", "refused", "eager", "wrong", "upstream", "skipped", "samples", "failed samples")


def as_text(rows: Sequence[Row], title: str) -> str:
    """The report for people: totals, failures, and what was refused for which reason."""
    lines = [title, "", f"{'':24}" + "".join(f"{column:>16}" for column in COLUMNS)]
    for kind, counts in totals(rows).items():
        lines.append(f"{kind:24}" + "".join(f"{counts.get(column, 0):>16}" for column in COLUMNS))
    failed = [row for row in rows if row.failure]
    lines += ["", f"Failures: {len(failed)}", *(f"  {row.name}: {row.failure}" for row in failed)]
    upstream = [row for row in rows if any(o.status == UPSTREAM for o in row.outcomes)]
    lines += ["", f"torch's own aot_eager backend fails as well: {len(upstream)}"]
    for row in upstream:
        why = next(o.why for o in row.outcomes if o.status == UPSTREAM)
        lines.append(f"  {row.name}: {why[:160]}")
    for code, operators in sorted(refusal_codes(rows).items()):
        lines += ["", f"Refused for {code}: {len(operators)} operators"]
        for operator, names in sorted(operators.items(), key=lambda item: (-len(item[1]), item[0])):
            lines.append(f"  {operator}: {len(names)}, such as {names[0]}")
    return "\n".join(lines) + "\n"


def write(rows: Sequence[Row], folder: Path, title: str) -> None:
    """`report.json` and `report.txt` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "title": title,
        "totals": totals(rows),
        "rows": [
            {
                "name": r.name,
                "verdict": r.verdict,
                "failure": r.failure,
                "samples": len(r.outcomes),
                "refused": r.refusals,
            }
            for r in rows
        ],
    }
    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "report.txt").write_text(as_text(rows, title))


def to_wire(outcome: Outcome) -> dict[str, object]:
    """An outcome as JSON values."""
    return dataclasses.asdict(outcome)


def from_wire(data: dict[str, object]) -> Outcome:
    """The inverse of `to_wire`."""
    refused = tuple(tuple(item) for item in data["refused"])  # type: ignore[attr-defined]
    return Outcome(str(data["status"]), str(data["why"]), int(data["taken"]), refused)  # type: ignore[call-overload]
