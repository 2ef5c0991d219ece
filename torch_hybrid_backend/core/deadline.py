"""The deadline of a graph: how long compiling its kernels may take, all engines and all compilations together.

The wiring makes one for each graph that Dynamo hands over; forward, backward and the bodies of control flow share it. Its clock runs only
while something compiles: a first call may come hours after the compilation, and what it spends in running the model is not compiling. What
a first call compiles (other variants of a kernel, an exact one) has what compilation left.

    deadline = Deadline(300.0)
    with deadline.running():
        ...                         # compile
    deadline.left_s()               # 300 less what that took, now and an hour later
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Deadline:
    """A clock that counts down while it runs. Owned by one graph, handed to all who compile for it; thread-safe.

    limit_s: seconds of compiling, all together; more than 0. `clock` gives seconds that never go back.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._left_s = limit_s
        self._now = 0.0
        self._runners = 0

    def left_s(self) -> float:
        """Seconds that are left for compiling, at least 0."""
        with self._lock:
            self._count()
            return max(0.0, self._left_s)

    def is_over(self) -> bool:
        """True if nothing is left: what is not compiled by now will not be."""
        return self.left_s() == 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The clock runs inside. It may be entered again inside, and by several threads at once: a second is a second."""
        with self._lock:
            self._count()
            self._runners += 1
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._runners -= 1

    def _count(self) -> None:
        now = self._clock()
        if self._runners:
            self._left_s -= now - self._now
        self._now = now
