"""Detection of other load on the cores while this process timed its kernels. Utility: reads /proc.

If threads of this process are ready to run while other programs hold the cores, timings show those programs. OpenMP's threads wait for the last
of them, so a call of 100 us takes a time slice or two of the scheduler, whichever engine runs it. Rounds and quartiles help against load that
comes and goes, not against load that stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from torch_hybrid_backend.errors import failures

# Share of the elapsed time for which threads waited, from which on other load is felt. On an idle machine threads wait for up to 4%. Beside a
# process that takes a tenth of a core they wait for 12%, and the lower quartile does not change. Beside a process that takes a whole core they
# wait for half of the time and more (benchmarks/other_load.py).
FELT = 0.2
# Margin for comparing disturbed times. Beside two other processes on two cores, whole calls were up to 1.3 times apart, where on an idle
# machine one takes ten times the other.
MARGIN = 1.5


def thread_waits() -> Mapping[str, int]:
    """Thread number -> nanoseconds for which the thread was ready and waited for a core. Empty if the system does not report it (Linux without
    schedstat, other systems)."""
    waits: dict[str, int] = {}
    try:
        threads = os.listdir("/proc/self/task")
    except failures(OSError):
        return waits
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                waits[thread] = int(file.read().split()[1])
        except failures(OSError, ValueError, IndexError):  # the thread has ended
            continue
    return waits


class OtherLoad:
    """Time that other load has taken from this process since the object was created."""

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
        """Time that all threads together waited for a core, as a share of the elapsed time; 0 if the system does not report it."""
        elapsed = self._clock() - self._start
        waited = sum(max(0, ns - self._before.get(thread, 0)) for thread, ns in self._waits().items())
        return waited / elapsed if elapsed > 0 else 0.0

    def is_felt(self) -> bool:
        """True if the other load was enough to disturb timings."""
        return self.share > FELT
