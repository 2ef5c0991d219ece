"""Known failures, and their reasons: one table. Whatever fails and is not in it is a fault; so is what is in it and succeeds."""

from __future__ import annotations

from collections.abc import Sequence

from tests.operators.rows import Row

# (mode, "operator kind" as reports name it) -> the reason. An entry counts for complete runs only: a few samples may miss the fault.
EXPECTED: dict[tuple[str, str], str] = {}


def surprises(rows: Sequence[Row], *, complete: bool) -> list[str]:
    """Failures that the table does not list, and, where every sample ran, successes of what it does."""
    found = []
    for row in rows:
        reason = EXPECTED.get((row.mode, row.name))
        if row.failure and reason is None:
            found.append(f"{row.mode}: {row.name}: {row.failure}")
        elif not row.failure and reason is not None and complete:
            found.append(
                f"{row.mode}: {row.name}: it works now; take it from the table of expected failures ({reason})"
            )
    return found
