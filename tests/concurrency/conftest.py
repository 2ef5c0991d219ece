"""Fixtures of the concurrency tests: placement by estimate, a fresh Dynamo for every test, threads that report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.compiling import by_estimate, fresh_dynamo

__all__ = ["by_estimate", "fresh_dynamo", "run_together"]

# Long enough for any of these tests on a loaded machine: what takes longer is a deadlock.
DEADLINE_S = 240.0


def run_together(tasks: Sequence[Callable[[], object]]) -> None:
    """Run the tasks in a thread each, all at once. Raises the first error of any, or TimeoutError for a thread that hangs."""
    start = threading.Barrier(len(tasks))
    errors: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            start.wait(DEADLINE_S)
            task()
        except BaseException as error:  # raised in the test's own thread below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"threads still run after {DEADLINE_S:.0f} s: a deadlock")
