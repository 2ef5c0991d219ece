"""A lock that a forked child finds free.

Graphs are compiled in a thread of their own (`background`). Where a process forks meanwhile, its child has no such thread, and what that held
would stay locked for ever. What the lock protects is replaced as a whole, last, so that a child finds one state or the next.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class ForkLock:
    """A re-entrant lock, used by `with` only."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Free the lock in a forked child."""
        self._lock = threading.RLock()


_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
