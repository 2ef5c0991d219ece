"""What the run is at, on standard error: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_BAR = 24


class Progress:
    """Owns the terminal's last line while a run of `total` steps goes on."""

    def __init__(
        self, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._total = total
        self._done = 0
        self._stream = stream or sys.stderr
        self._clock = clock
        self._start = clock()
        self._live = self._stream.isatty()

    def at(self, text: str) -> None:
        """What is being done now."""
        elapsed_s = self._clock() - self._start
        if not self._live:
            self._stream.write(f"[{_minutes(elapsed_s)}] {self._done}/{self._total} {text}\n")
        else:
            full = round(_BAR * self._done / self._total) if self._total else _BAR
            left = f", {_minutes(elapsed_s / self._done * (self._total - self._done))} left" if self._done else ""
            bar = f"[{'#' * full}{'.' * (_BAR - full)}] {self._done}/{self._total}"
            self._stream.write(f"\r\x1b[K{bar} {text} ({_minutes(elapsed_s)}{left})")
        self._stream.flush()

    def step(self, text: str) -> None:
        """One step is done; `text` stays on the screen."""
        self._done += 1
        if self._live:
            self._stream.write(f"\r\x1b[K{text}\n")
        else:
            self.at(text)
        self._stream.flush()

    def end(self) -> None:
        """Leave the terminal at the start of a line."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
