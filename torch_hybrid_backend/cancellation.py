"""Work that nobody waits for, and that may be stopped: it looks, between two steps, whether somebody still wants it.

    with cancellable(cancellation):     # in the thread that works
        ...                             # what it calls, calls `check()` between two steps
    cancellation.cancel()               # in any other thread

Work that a caller waits for is not in such a block: there `check` does nothing, and Ctrl-C is what stops it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_LOOK_EVERY_S = 0.1


class Cancelled(BaseException):
    """Raised in work that was cancelled. As KeyboardInterrupt, it is nobody's to handle on the way."""


class Cancellation:
    """Work that can be given up: it tells whether it is still wanted."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        """The work is not wanted any more."""
        self.is_cancelled = True


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


@contextlib.contextmanager
def cancellable(cancellation: Cancellation) -> Iterator[None]:
    """Have what this thread does inside stop soon after `cancellation.cancel()`."""
    token = _current.set(cancellation)
    try:
        yield
    finally:
        _current.reset(token)


def is_awaited() -> bool:
    """True if somebody waits for what this thread does."""
    return _current.get() is None


def check() -> None:
    """Raises Cancelled where the work of this thread is not wanted any more."""
    current = _current.get()
    if current is not None and current.is_cancelled:
        raise Cancelled


def patience(seconds: float) -> float:
    """Seconds to wait before looking again, of `seconds` that are left: all of them where nobody can cancel. Raises as `check` does."""
    check()
    return seconds if is_awaited() else min(seconds, _LOOK_EVERY_S)
