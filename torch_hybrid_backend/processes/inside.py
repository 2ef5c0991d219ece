"""Functions for a child process that `child` started: end with the parent or at a time limit, and answer."""

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
    """Make this process end with its parent. Returns the descriptors of orders, to read, and of answers, to write.

    lifeline: the reading end of a pipe that nobody writes to. The process ends at once when the other end is closed.
    """
    _end_with_parent(lifeline)
    faulthandler.enable()
    _forbid_core_dumps()
    # Orders and answers get other descriptors than 0 and 1, so that output of a compiler or a linker is not read as an answer.
    orders, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return orders, answers


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End this process after `seconds` by SIGALRM, even if it hangs in C++."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def described(error: BaseException) -> dict[str, object]:
    """An exception as an answer for the parent, where `child.as_exception` makes an exception of it."""
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
    """End this process by SIGIO when the parent ends. SIGIO's default action ends a process even while it runs C++.

    The pipe of orders cannot serve for this: SIGIO for an order may arrive after the order was read.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    # A running linker ends too, if this process leads its group, as each child does.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid() if os.getpgrp() == os.getpid() else os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # the parent ended before the signal was armed
        sys.exit()


def _forbid_core_dumps() -> None:
    import resource

    with ignored(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
