"""docs/faults.md says what the tests show."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end import fault_table


def test_the_page_is_current() -> None:
    """It is what the tests' marks make, so that no fault is claimed without a test, and none tested without being told."""
    written = fault_table.DOCUMENT.read_text()
    assert written == fault_table.table(), "run: python -m tests.end_to_end.fault_table"


def test_every_fault_test_is_listed() -> None:
    """Each file of fault tests is read, and each fault has its own line."""
    found = {path.stem for path in Path(__file__).parent.glob("test_faults*.py")}
    assert found == set(fault_table.MODULES)
    faults = [what for what, _, _ in fault_table.rows()]
    assert len(faults) == len(set(faults)) >= 40
