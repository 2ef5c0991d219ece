"""The builder process: it reads one request and writes one result, both as files in a folder of the build.

Only `builds` starts builder processes and talks to them. A builder process answers in JSON, so that nothing that a crashing builder writes is
unpickled:

    {"progress": 0.25}                                                                 now and then
    {"error": null} or {"error": {"type": ..., "message": ..., "traceback": ...}}      at the end

The process stops at the end of its input.
"""

from __future__ import annotations

import importlib
import select
import time
from collections.abc import Callable
from pathlib import Path

from torch_hybrid_backend.errors import CompileError, failures
from torch_hybrid_backend.processes.inside import answer, begin, described, time_limit

REQUEST, RESULT = "request", "result"
_REPORT_EVERY_S = 0.1

# A builder: takes the request and `going_on(fraction done)`, which returns false to stop the build. Returns the result.
Function = Callable[[bytes, Callable[[float], bool]], bytes]


def main(lifeline: int, entry: str, folder: str, limit_s: str) -> None:
    """Call the function `entry` ("package.module:function") with the request in `folder`, and write its result there.

    The process ends itself after `limit_s` seconds, in case its parent has died."""
    orders, answers = begin(lifeline)
    going_on = GoingOn(orders, answers)
    try:
        with time_limit(float(limit_s)):
            module, _, name = entry.partition(":")
            function: Function = getattr(importlib.import_module(module), name)
            result = function(Path(folder, REQUEST).read_bytes(), going_on)
            if not isinstance(result, bytes):
                raise CompileError(f"{entry} returned an object of type {type(result).__name__}; it must be bytes")
            Path(folder, RESULT).write_bytes(result)
    except failures(Exception) as error:  # any error of a builder is the answer
        answer(answers, {"error": described(error)})
        return
    answer(answers, {"error": None})


class GoingOn:
    """The `going_on` of a builder. A call also reports the builder's progress to the parent, at most every 0.1 s."""

    def __init__(self, orders: int, answers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._orders = orders
        self._answers = answers
        self._clock = clock
        self._next_report = -float("inf")

    def __call__(self, done: float) -> bool:
        """Return False if the build must stop, from then on in every call. done: the fraction that is done, between 0 and 1."""
        if select.select([self._orders], [], [], 0)[0]:  # nothing is ever sent: the parent has closed the input
            return False
        now = self._clock()
        if now >= self._next_report:
            self._next_report = now + _REPORT_EVERY_S
            answer(self._answers, {"progress": min(max(float(done), 0.0), 1.0)})
        return True
