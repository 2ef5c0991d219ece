"""Progress of what takes long enough for a user to ask: one line that is rewritten on a terminal, plain lines now and then elsewhere.

with Progress("tuning", total=12) as progress:
    for kernel in kernels:
        progress.step(f"{kernel.name}: 3% less")
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_PLAIN_INTERVAL_S = 10.0  # between lines that are not rewritten
_WIDTH = 24


class Progress:
    """Writes to standard error, or to `stream`; with `shown` False nowhere. `total` counts the steps to come."""

    def __init__(
        self,
        title: str,
        total: int,
        *,
        shown: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._shown, self._clock = title, total, shown, clock
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._done = 0
        self._start = self._last = clock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown and self._on_terminal:
            self._write("\n")

    def at(self, note: str) -> None:
        """What is being done now."""
        self._tell(note)

    def step(self, note: str = "") -> None:
        """One step is done."""
        self._done += 1
        self._tell(note)

    def _tell(self, note: str) -> None:
        now = self._clock()
        if not self._shown or not (self._on_terminal or now - self._last >= _PLAIN_INTERVAL_S):
            return
        self._last = now
        done, total = self._done, max(self._total, self._done)
        left = f", {(now - self._start) / done * (total - done):.0f} s left" if done else ""
        full = _WIDTH * done // total
        bar = f"|{'#' * full}{' ' * (_WIDTH - full)}| " if self._on_terminal else ""
        line = f"{self._title}: {bar}{done}/{total}{left}{', ' if note else ''}{note}"
        self._write(f"\r\x1b[K{line}" if self._on_terminal else f"{line}\n")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._shown:
            self._write(f"\r\x1b[K{line}\n" if self._on_terminal else f"{line}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
