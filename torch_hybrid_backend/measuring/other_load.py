"""Other load: whether something else held the cores while this process timed its kernels. Utility: reads /proc.

Where threads of this process are ready to run and others hold the cores, what is timed tells of the others: OpenMP's threads wait for the last
of them, and a call of 100 us takes a time slice or two of the scheduler, whoever computes it. Rounds and quartiles help against load that
comes and goes, not against load that stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from torch_hybrid_backend.errors import failures

# Of the time that went by. On an idle machine threads wait for up to 4%, beside something that takes a tenth of a core for 12%, with which the
# lower quartile is as ever; beside one process that takes a whole core for half of it and more (benchmarks/other_load.py).
FELT = 0.2
# Times that other load disturbed are compared with this margin: whole calls beside two others on two cores were up to 1.3 times apart where
# one takes ten times the other on an idle machine.
MARGIN = 1.5


def thread_waits() -> Mapping[str, int]:
    """Nanoseconds for which each thread of this process was ready and waited for a core, by its number; nothing where the system does not
    tell (Linux without schedstat, others)."""
    waits: dict[str, int] = {}
    try:
        threads = os.listdir("/proc/self/task")
    except failures(OSError):
        return waits
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                waits[thread] = int(file.read().split()[1])
        except failures(OSError, ValueError, IndexError):  # it has ended
            continue
    return waits


class OtherLoad:
    """Time that other load took from this process since this was made."""

    def __init__(
        self,
        waits: Callable[[], Mapping[str, int]] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._waits = waits or thread_waits
        self._clock = clock
        self._before = self._waits()
        self._start = clock()

    @property
    def share(self) -> float:
        """Time that threads waited for a core, all of them together, as a share of the time that went by; 0 where the system does not tell."""
        elapsed = self._clock() - self._start
        waited = sum(max(0, ns - self._before.get(thread, 0)) for thread, ns in self._waits().items())
        return waited / elapsed if elapsed > 0 else 0.0

    def is_felt(self) -> bool:
        """True if it was enough to tell in what was timed meanwhile."""
        return self.share > FELT
