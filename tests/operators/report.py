"""The written report of a run: docs/correctness.md, and its tables for machines.

    python -m tests.operators.report JOURNAL_FOLDER            writes docs/correctness.md and tests/operators/results/

`results/<mode>.json` says for every operator and module, by kind, how the engine took it: "taken", "partly: code",
"refused: code", "none" (nothing to compute: views, or no elements), "wrong", "upstream", "skipped"; `results/refusals.json` says
for every ATen operator that was refused why, and in how many tasks.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.operators.execution import PASSED, SKIPPED, UPSTREAM
from tests.operators.expected import EXPECTED
from tests.operators.rows import FAILURES, Journal, Row
from tests.operators.tasks import KINDS, tasks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "correctness.md"
RESULTS = ROOT / "tests" / "operators" / "results"
MODES = {
    "tvm": "The TVM engine, forced",
    "default": "The default backend",
}
_MOST_OPERATORS = 30

INTRODUCTION = """\
# Correctness: operators and modules

Written by `make test-full`; do not edit. PyTorch's own tables of operators (`op_db`) and modules
(`module_db`) through the backend, each sample compared with eager: dtypes, shapes and strides exactly, integers exactly, floating-point values
by the tolerances of `torch.testing`, and where those fail by a float64 run: no element may be farther from it than twice eager's largest
error and four units in the last place.

Each sample runs twice, through the Python executor and through the C++ plan. **Forced** means: the engine runs every operator that it does not
refuse, whether or not that pays, nothing is verified behind the test's back, and what fails raises. **Default** is the backend as users have
it, but for timing; of other dtypes than float32 it runs two samples of a task. "backward" and "train" compare gradients too; "strided" spreads
the inputs' elements in memory. Modules come through Dynamo, and so does the first float32 sample of each operator; the other samples
of operators are traced by AOTAutograd directly. Of operators that draw random numbers only dtypes, shapes and layouts are compared.
"""

COLUMNS = """\
A task is one operator or module of one kind; so many *samples* of its samples were run, spread over all *of* them. Samples that passed are
split by how the engine took their graphs: *taken* whole, in *part*, *refused* (it was offered operators and took none), or *nothing* to
compute (views, no elements). *Not compared*: eager raises, or nothing comes out. *Upstream*: torch's own `aot_eager` backend is wrong or
fails, too. *Wrong*: values, an exception, a crash or a hang.
"""


def main(arguments: Sequence[str]) -> None:
    rows = list(Journal(Path(arguments[0]) / "journal.jsonl").rows.values())
    RESULTS.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(rows))
    for mode in MODES:
        found = {row.name: _word(row) for row in rows if row.mode == mode}
        (RESULTS / f"{mode}.json").write_text(_table(rows, mode) if found else "{}\n")
    (RESULTS / "refusals.json").write_text(json.dumps(_refusals(rows), indent=1) + "\n")


def page(rows: Sequence[Row]) -> str:
    """The report as Markdown."""
    parts = [INTRODUCTION, f"{_versions()}\n", COLUMNS]
    for mode, title in MODES.items():
        mine = [row for row in rows if row.mode == mode]
        if mine:
            parts.append(f"## {title}\n\n{_totals(mine)}")
    parts.append(_failures(rows))
    parts.append(_codes([row for row in rows if row.mode == "tvm"]))
    parts.append(_upstream([row for row in rows if row.mode == "default"]))
    return "\n".join(parts)


def _versions() -> str:
    names = ("torch", "apache-tvm", "numpy", "torch-hybrid-backend")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return f"Versions: Python {platform.python_version()}, {', '.join(found)}; {platform.machine()}."


def _totals(rows: Sequence[Row]) -> str:
    head = "kind tasks samples run-of passed taken part refused nothing not-compared upstream **wrong**".split()
    lines = ["| " + " | ".join(head).replace("run-of", "of").replace("not-compared", "not compared") + " |"]
    lines.append("| --- |" + " ---: |" * (len(head) - 1))
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    for kind, some in [*by_kind.items(), ("all", list(rows))]:
        if some:
            lines.append(_total(kind, some))
    return "\n".join(lines) + "\n"


def _total(kind: str, rows: Sequence[Row]) -> str:
    statuses: collections.Counter[str] = collections.Counter()
    shares: collections.Counter[str] = collections.Counter()
    for row in rows:
        statuses.update(row.statuses)
        shares.update(row.shares)
    every = len(tasks(".*", KINDS if kind == "all" else [kind]))
    cells = [
        str(len(rows)) if len(rows) == every else f"{len(rows)} of {every}",
        sum(row.samples for row in rows),
        sum(row.available for row in rows),
        statuses[PASSED],
        *(shares[share] for share in ("taken", "partly", "refused", "none")),
        statuses[SKIPPED],
        statuses[UPSTREAM],
        sum(statuses[status] for status in FAILURES),
    ]
    return f"| {kind} | " + " | ".join(map(str, cells)) + " |"


def _failures(rows: Iterable[Row]) -> str:
    lines = ["## Failures\n"]
    for row in rows:
        if row.failure:
            reason = EXPECTED.get((row.mode, row.name), "not known yet")
            lines.append(f"- {row.mode}: `{row.name}`: {row.failure[:300]} ({reason})")
    return "\n".join(lines if len(lines) > 1 else [*lines, "None."]) + "\n"


def _codes(rows: Sequence[Row]) -> str:
    """The forced engine's refusals: code -> ATen operators by the number of tasks they were refused in."""
    lines = [
        "## What the TVM engine refuses\n",
        "ATen operators by the number of tasks in which the engine refused them.\n",
    ]
    codes: dict[str, collections.Counter[str]] = {}
    sentences: dict[tuple[str, str], collections.Counter[str]] = {}
    for row in rows:
        for operator, code in {(r.operator, r.code) for r in row.refusals if r.matters}:
            codes.setdefault(code, collections.Counter())[operator] += 1
        for r in row.refusals:
            if r.matters:
                sentences.setdefault((r.operator, r.code), collections.Counter())[r.why] += 1
    for code, operators in sorted(codes.items(), key=lambda item: -sum(item[1].values())):
        lines.append(f"**{code}**: {len(operators)} operators, {sum(operators.values())} times.\n")
        if code != "unknown_operator":
            for operator, count in operators.most_common(_MOST_OPERATORS):
                lines.append(f"- `{operator}` {count}: {sentences[operator, code].most_common(1)[0][0][:140]}")
        else:
            shown = [f"`{operator}` {count}" for operator, count in operators.most_common(2 * _MOST_OPERATORS)]
            lines.append(", ".join(shown) + (", ..." if len(operators) > len(shown) else ""))
        lines.append("")
    return "\n".join(lines)


def _upstream(rows: Sequence[Row]) -> str:
    found = sorted({row.subject for row in rows if row.statuses.get(UPSTREAM)})
    names = ", ".join(f"`{name}`" for name in found) or "nothing"
    return f"## Upstream\n\nWhat torch's own `aot_eager` backend fails at as well: {names}.\n"


def _word(row: Row) -> str:
    return f"{row.verdict}: {row.code}" if row.verdict in ("partly", "refused") else row.verdict


def _table(rows: Sequence[Row], mode: str) -> str:
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.mode == mode:
            table.setdefault(row.subject, {})[row.kind] = _word(row)
    lines = [f" {json.dumps(subject)}: {json.dumps(kinds)}" for subject, kinds in sorted(table.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _refusals(rows: Sequence[Row]) -> Mapping[str, Mapping[str, object]]:
    """ATen operator -> code -> tasks, and the most common sentence."""
    tasks: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        for refusal in row.refusals:
            if row.mode == "tvm" and refusal.matters:
                tasks.setdefault(refusal.operator, {}).setdefault(refusal.code, set()).add(row.name)
    return {operator: {code: len(names) for code, names in codes.items()} for operator, codes in sorted(tasks.items())}


if __name__ == "__main__":
    main(sys.argv[1:])
