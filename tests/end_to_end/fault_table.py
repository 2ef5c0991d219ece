"""docs/faults.md, made from the tests that show each fault: `python -m tests.end_to_end.fault_table` writes it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "faults.md"
_FIRST = ("test_faults_compiler", "test_faults_cache", "test_faults_engines", "test_faults_process", "test_faults")
# Those of `tests/reports` follow the others, in the order of their names.
OF_FILES = (
    "end_to_end.test_foreign_targets",
    "end_to_end.test_several_targets",
    "runtime.native.test_artifact",
    "artifact.test_model",
    "artifact.test_signing",
    "runner.test_keys",
    "runner.test_operators",
    "runner.test_other_processors",
    "runner.test_runner",
    "serve.test_rollouts",
    "serve.test_nodes",
    "serve.test_overload",
    "storage.test_shared",
    "tuning.test_cluster",
)
MODULES = (
    *(f"end_to_end.{name}" for name in _FIRST),
    *OF_FILES,
    *sorted(f"reports.{path.stem}" for path in (TESTS / "reports").glob("test_*.py")),
)
_HEAD = """# Faults

What the user sees when something fails, and the test that shows it. Each test runs in a real process. No fault gives a wrong answer, a hang
or a crash.

- "Nothing": the user notices nothing.
- "One warning": one warning is logged, and the answer is right. With `HYBRID_STRICT=1` this is an error instead.

This page is generated from the tests that are marked as faults by `python -m tests.end_to_end.fault_table`.
"""


def rows() -> Iterator[tuple[str, str, str]]:
    """(fault, what the user sees, test) of every test that is marked so, in the order of the files."""
    for module in MODULES:
        tests = vars(importlib.import_module(f"tests.{module}"))
        for name, test in tests.items():
            for mark in getattr(test, "pytestmark", ()) if name.startswith("test_") else ():
                if mark.name == "fault":
                    what, seen = mark.args
                    yield what, seen, f"{module.replace('.', '/')}.py::{name}"


def table() -> str:
    """The page."""
    lines = ["| fault | what the user sees | test |", "|---|---|---|"]
    lines += [f"| {what} | {seen} | `{test}` |" for what, seen, test in rows()]
    return _HEAD + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(table())
