"""Progress of what takes long enough for a user to ask: one line on a terminal, drawn by tqdm; nothing where standard error is none.

    with Progress("tuning", total=12) as progress:
        for kernel in kernels:
            progress.step(f"{kernel.name}: 3% less")

A task that begins within another one of the same thread is a stage of it, and shares its line:

    with Progress("ResNet", delay_s=2.0):          # ResNet: compiling kernels ###       12/56 [00:07]
        with Progress("compiling kernels", total=56) as progress:
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TextIO, TypeVar

from torch_hybrid_backend.errors import failures

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DRAWN_S = 0.1  # at least between two drawings
_TICK_S = 1.0  # at most, so that the seconds go on where a step takes long
_BAR = "{bar:24} {n_fmt}/{total_fmt}"


class Progress:
    """A task of `total` steps, or of an unknown number (0), shown on standard error, or `stream`, if that is a terminal.

    `delay_s`: seconds until it is shown. `spent_s`: seconds that the task took earlier, which count for both times. A stage is shown where,
    and only if, its task is.
    """

    def __init__(
        self,
        title: str,
        total: int = 0,
        *,
        shown: bool = True,
        delay_s: float = 0.0,
        spent_s: float = 0.0,
        stream: TextIO | None = None,
    ) -> None:
        self._title, self._total, self._done, self._note = title, total, 0, ""
        self._shown, self._delay_s, self._spent_s, self._stream = shown, delay_s, spent_s, stream
        self._task: Progress | None = None
        self._line: _Line | None = None

    def __enter__(self) -> Progress:
        self._task = _here.current
        if self._task is not None:
            self._shown, self._stream, self._line = self._task._shown, self._task._stream, self._task._line
        else:
            self._stream = self._stream or sys.stderr  # which is None in a process without one
            if self._shown and self._stream is not None and self._stream.isatty():
                self._line = _Line(self._stream, self._delay_s, self._spent_s)
        _here.current = self
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _here.current = self._task
        if self._task is not None:
            self._task._draw()
        elif self._line is not None:
            self._line.close()

    def at(self, note: str) -> None:
        """Tell what is being done now."""
        self._note = note
        self._draw()

    def reach(self, done: int, total: int, note: str = "") -> None:
        """Set how many steps of how many are done, where others count them."""
        self._done, self._total = done, total
        self.at(note)

    def step(self, note: str = "") -> None:
        """Count one step as done."""
        self._done += 1
        self.at(note)

    def say(self, line: str) -> None:
        """Write a line that stays."""
        if self._line is not None:
            self._line.say(line)
        elif self._shown and self._stream is not None:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def _draw(self) -> None:
        if self._line is not None:
            title = f"{self._root._title}: {self._title}" if self._task is not None else self._title
            self._line.draw(title, self._done, self._total, self._note, is_stage=self._task is not None)

    @property
    def _root(self) -> Progress:
        return self if self._task is None else self._task._root


def stepping(progress: Progress, work: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function that does the work and counts it as one step."""

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        result = work(*args, **kwargs)
        progress.step()
        return result

    return run


class _Here(threading.local):
    current: Progress | None = None  # the innermost task of this thread


_here = _Here()


def _size(stream: TextIO) -> dict[str, Any]:
    """tqdm's options for the terminal's size; a usual one where the terminal has none, as under `script`, in which tqdm would draw nothing."""
    try:
        has_size = all(os.get_terminal_size(stream.fileno()))
    except failures(OSError, ValueError):
        has_size = False
    return {"dynamic_ncols": True} if has_size else {"ncols": 80, "nrows": 24}


class _Line:
    """A line of a terminal. A thread of its own draws it now and then."""

    def __init__(self, stream: TextIO, delay_s: float, spent_s: float) -> None:
        self._stream, self._delay_s = stream, delay_s
        self._start = time.monotonic() - spent_s
        self._drawn = 0.0
        self._bar: Any = None
        self._state = ("", 0, 0, "", False)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._tick, name="hybrid-progress", daemon=True).start()

    def draw(self, title: str, done: int, total: int, note: str, *, is_stage: bool) -> None:
        self._state = (title, done, total, note, is_stage)
        if time.monotonic() - self._drawn >= _DRAWN_S:
            self._redraw()

    def say(self, line: str) -> None:
        from tqdm import tqdm

        with self._lock:
            tqdm.write(line, file=self._stream)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._bar is not None:
                self._bar.close()

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            self._redraw()

    def _redraw(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._closed.is_set() or now - self._start < self._delay_s:
                return
            if self._bar is None:
                from tqdm import tqdm  # when first needed: importing this package must stay cheap

                # With a delay, as a bar without one is drawn before it has its title.
                self._bar = tqdm(total=0, leave=False, file=self._stream, delay=1e-6, **_size(self._stream))
                self._bar.start_t = time.time() - (now - self._start)
            title, done, total, note, is_stage = self._state
            bar = self._bar
            bar.n, bar.total = done, max(total, done)
            times = "{elapsed}" if is_stage or not done else "{elapsed}<{remaining}"
            bar.bar_format = "{desc} " + (f"{_BAR} " if total else "") + f"[{times}]" + "{postfix}"
            bar.set_description_str(title, refresh=False)
            bar.set_postfix_str(note, refresh=False)
            bar.refresh()
            self._drawn = now
