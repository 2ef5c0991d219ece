"""The builder process: one request in, one result out, both as files of a folder that belongs to the build.

`builds` starts it and is the only one to speak to it. It answers in JSON, so that nothing a crashing builder writes is ever unpickled:

    {"progress": 0.25}                                                          now and then
    {"error": null} or {"error": {"type": ..., "message": ..., "traceback": ...}}      at the end; the result is there, or what stopped it

The end of its input tells it to stop.
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

# What a builder is: request, and `going_on(fraction done)`, which says whether to go on -> result.
Function = Callable[[bytes, Callable[[float], bool]], bytes]


def main(lifeline: int, entry: str, folder: str, limit_s: str) -> None:
    """Call the function `entry` ("package.module:function") with the request in `folder`, and put its result there. The process ends itself
    after `limit_s` seconds, in case nobody is left to end it."""
    orders, answers = begin(lifeline)
    asked = Asked(orders, answers)
    try:
        with time_limit(float(limit_s)):
            module, _, name = entry.partition(":")
            function: Function = getattr(importlib.import_module(module), name)
            result = function(Path(folder, REQUEST).read_bytes(), asked)
            if not isinstance(result, bytes):
                raise CompileError(f"{entry} returned an object of type {type(result).__name__}; it must be bytes")
            Path(folder, RESULT).write_bytes(result)
    except failures(Exception) as error:  # whatever a builder raises: it is the answer
        answer(answers, {"error": described(error)})
        return
    answer(answers, {"error": None})


class Asked:
    """Question of a builder, now and then, whether to go on. The answer tells the parent how far the builder is, at most every 0.1 s."""

    def __init__(self, orders: int, answers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._orders = orders
        self._answers = answers
        self._clock = clock
        self._next_report = -float("inf")

    def __call__(self, done: float) -> bool:
        """done: the fraction that is done, between 0 and 1. Once it is False it stays so."""
        if select.select([self._orders], [], [], 0)[0]:  # nothing is ever sent: this is the end
            return False
        now = self._clock()
        if now >= self._next_report:
            self._next_report = now + _REPORT_EVERY_S
            answer(self._answers, {"progress": min(max(float(done), 0.0), 1.0)})
        return True
