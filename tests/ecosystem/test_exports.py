"""Every inference model of the catalogue as a file: bit for bit its live plan, in Python and in the runner; or refused as its case says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem import exports
from tests.ecosystem.catalogue import CASES
from tests.ecosystem.export_trial import ExportTrial
from tests.ecosystem.libraries import missing
from tests.ecosystem.run import try_alone


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [case.name for case in CASES.values() if not case.train])
def test_models_as_files(name: str, tmp_path: Path) -> None:
    """A file has the results of the plan that it was made of; the runner has them too, but for models with parts that only Python runs."""
    case = CASES[name]
    if missing(case.library):
        pytest.skip(missing(case.library))
    log = tmp_path / "log"
    found = try_alone(ExportTrial(name, 2), log)
    assert "raises" not in found, f"{found['raises']}\n{log.read_text()[-4000:]}"
    assert exports.is_explained(found), (
        found["wrong"] or found["refused"] or "it has a file, and not_exported says otherwise"
    )
    assert found["refused"] or found["in_runner"] or found["python_parts"] or found["needs_torch"]


def _entry(**changed: Any) -> dict[str, Any]:
    right = {
        "name": "recommender/deep_fm",
        "refused": "",
        "wrong": "",
        "python_parts": [],
        "needs_torch": False,
        "sizes": [],
        "in_runner": True,
        "day": "2026-11-29",
    }
    return {**right, **changed}


@pytest.mark.parametrize(
    ("changed", "row", "is_explained"),
    [
        ({}, "| equal | equal |  |", True),
        (
            {
                "python_parts": ["nobody can (m.py:1 in f: x)", "nobody can (m.py:2 in f: y)", "an engine"],
                "in_runner": False,
            },
            "| equal | refused | nobody can; an engine |",
            True,
        ),
        ({"needs_torch": True, "in_runner": False}, "| equal | not compared | calls operators of PyTorch |", True),
        ({"wrong": "call 1: far"}, "| wrong | | call 1: far |", False),
        ({"raises": "ValueError: a | b"}, "| raises | | ValueError: a \\| b |", False),
        ({"refused": "cannot; the error before this one has the rest"}, "| no file | | cannot |", False),
        (
            {"name": "recurrent/tagger", "refused": "must be tuple of ints, but"},
            "| no file | | must be tuple of ints, but |",
            True,
        ),
        ({"name": "recurrent/tagger"}, "| equal | equal |  |", False),
        ({"name": "zoo/bert_base"}, "| equal | equal | one set of sizes |", True),
        ({"name": "zoo/bert_base", "sizes": ["x"]}, "| equal | equal |  |", True),
    ],
)
def test_rows(changed: dict[str, Any], row: str, is_explained: bool) -> None:
    """The table says what became of each model; only a right file, or the refusal that its case names, is as it should be."""
    entry = _entry(**changed)
    lines = exports.table([entry]).splitlines()
    assert lines[2] == f"| {entry['name']} {row}"
    assert exports.is_explained(entry) == is_explained
    files = row.startswith("| equal")
    assert lines[-1] == f"1 models: {int(files)} files, {int(files and entry['in_runner'])} of which the runner runs."
