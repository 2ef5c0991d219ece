"""Inside a child process that `child` started: how it ends with its parent and in time, and how it answers."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator

from torch_hybrid_backend.errors import ignored, is_from_outside
from torch_hybrid_backend.processes.frames import frame


def begin(lifeline: int) -> tuple[int, int]:
    """Make this process end with its parent; the descriptors on which orders come in and answers go out.

    `lifeline`: the end of a pipe that nobody writes to; the process ends at once when its other end is closed.
    """
    _end_with_parent(lifeline)
    faulthandler.enable()
    _forbid_core_dumps()
    # The two ends move out of the way: what a compiler or a linker prints must not be taken for an answer.
    orders, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return orders, answers


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """The kernel's default action on SIGALRM ends this process, even while it hangs in C++."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def described(error: BaseException) -> dict[str, object]:
    """An exception as the parent is told of it; `child.as_exception` makes one of it again."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "recurs": not is_from_outside(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def answer(descriptor: int, message: dict[str, object]) -> None:
    """Send one answer."""
    data = frame(json.dumps(message).encode())
    while data:
        data = data[os.write(descriptor, data) :]


def _end_with_parent(lifeline: int) -> None:
    """Have SIGIO, whose default action ends the process even while it is in C++, tell that the parent has ended.

    The pipe of the orders would not do: its SIGIO for an order may arrive after the order was read.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    # A linker at work ends too: each child is the head of a group.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid() if os.getpgrp() == os.getpid() else os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it ended before the signal was armed
        sys.exit()


def _forbid_core_dumps() -> None:
    import resource

    with ignored(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
