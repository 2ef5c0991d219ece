"""Lock that is free in a forked child.

Graphs are compiled in a thread of their own (`background`). A child that is forked meanwhile has no such thread, so a lock held by the thread
would never be released there. Code under the lock replaces the protected state as a whole, in its last step: so the child finds either the old
state or the new one.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class ForkLock:
    """A re-entrant lock, used only by `with`."""

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
