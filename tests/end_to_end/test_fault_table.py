"""docs/faults.md says what the tests show."""

from __future__ import annotations

import re

from tests.end_to_end import fault_table

_MARK = re.compile(r"^@(?:pytest\.mark\.)?fault\(", re.MULTILINE)


def test_the_page_is_current() -> None:
    """The page is made of the tests' marks, so that no fault is claimed without a test, and none tested without being told."""
    written = fault_table.DOCUMENT.read_text()
    assert written == fault_table.table(), "run: python -m tests.end_to_end.fault_table"


def test_every_fault_test_is_listed() -> None:
    """Each file that has a `fault` mark is read, and each fault has its own line."""
    files = [path for path in fault_table.TESTS.rglob("test_*.py") if _MARK.search(path.read_text())]
    found = {".".join(path.relative_to(fault_table.TESTS).with_suffix("").parts) for path in files}
    assert found <= set(fault_table.MODULES)
    faults = [what for what, _, _ in fault_table.rows()]
    assert len(faults) == len(set(faults)) >= 40


def test_marks_and_rows_are_as_many() -> None:
    """Every `fault` mark that a file holds is a row, with the path of its test below tests/."""
    for module in fault_table.MODULES:
        file = f"{module.replace('.', '/')}.py"
        marks = _MARK.findall((fault_table.TESTS / file).read_text())
        tests = [test.partition("::") for _, _, test in fault_table.rows()]
        assert len(marks) == sum(path == file for path, _, _ in tests), module
