"""TensorRT's log as ours.

TensorRT has one log for a process, which torch_tensorrt hands to a logger of Python's. A user who has TensorRT of their own reads it there, so
a record is ours by the thread that it is made in:

    log = TheirLog(logger)
    with log.heard() as heard: ...              # what TensorRT says in this thread is ours
    with log.heard(fully=True) as heard: ...    # at every level, for a build or a load; slow to enter
    heard.errors, heard.layers
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch_hybrid_backend.engines.tensorrt.overlap import Overlapping

_log = logging.getLogger(__name__)

_LAYER = re.compile(r"^Name: (.*?), LayerType: (\w+),(.*)", re.MULTILINE)
_PARTS = re.compile(r" (Inputs|Constants|Outputs|TacticName): ")
_DTYPE = re.compile(r"Datatype: (\w+)")


@dataclass(slots=True)
class Heard:
    """Messages of TensorRT: errors, and the layers of engines, which without a GPU are told in the log alone."""

    errors: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)

    @property
    def why(self) -> str:
        """The last errors as one text."""
        return "; ".join(self.errors[-3:]) or "it says no reason"

    def take(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.ERROR:
            self.errors.append(message)
        if message.startswith("Layers:"):
            self.layers += [_layer(*found) for found in _LAYER.findall(message)]
        # What an error means for the user is in the refusal.
        _log.log(min(record.levelno, logging.INFO), "TensorRT: %s", message)


class _Here(threading.local):
    def __init__(self) -> None:
        self.heard: list[Heard] = []  # of this thread, the innermost last


class TheirLog(logging.Filter):
    """Takes what is ours out of their logger. One for a logger, as long as the process lives."""

    def __init__(self, theirs: logging.Logger) -> None:
        super().__init__()
        self._theirs = theirs
        self._here = _Here()
        self._of_all: list[Heard] = []  # that hear threads of TensorRT's own, too
        self._passes = logging.NOTSET  # the level from which on others' records go on, while all are made
        self._fully = Overlapping(self._at_every_level)
        theirs.addFilter(self)

    @contextlib.contextmanager
    def heard(self, *, fully: bool = False) -> Iterator[Heard]:
        """Collect what TensorRT says in this thread. `fully`: at every level, and in threads that nobody hears: a builder has such."""
        heard = Heard()
        self._here.heard.append(heard)
        try:
            if not fully:
                yield heard
                return
            with self._fully:
                self._of_all.append(heard)
                try:
                    yield heard
                finally:
                    self._of_all.remove(heard)
        finally:
            self._here.heard.pop()

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record is none of ours, and goes where it did before."""
        found = self._here.heard or self._of_all
        if found:
            found[-1].take(record)
            return False
        return record.levelno >= self._passes

    @contextlib.contextmanager
    def _at_every_level(self) -> Iterator[None]:
        before, self._passes = self._theirs.level, self._theirs.getEffectiveLevel()
        self._theirs.setLevel(logging.DEBUG)
        yield
        self._passes = logging.NOTSET
        if self._theirs.level == logging.DEBUG:  # else somebody has set another meanwhile
            self._theirs.setLevel(before)


def _layer(name: str, kind: str, rest: str) -> str:
    """A layer with the types of what it reads, of its constants (which TensorRT-RTX 1.4 does not list) and of what it makes:
    "gemm: linear (Half, Half; Float -> Half)"."""
    _, *parts = _PARTS.split(rest)
    types = {part: ", ".join(_DTYPE.findall(text)) for part, text in zip(parts[::2], parts[1::2], strict=True)}
    read = "; ".join(filter(None, (types.get("Inputs"), types.get("Constants"))))
    return f"{kind}: {name} ({read} -> {types.get('Outputs', '')})"


# What torch_tensorrt calls it, in every release that is known.
their_logger = logging.getLogger("torch_tensorrt [TensorRT Conversion Context]")
their_log = TheirLog(their_logger)
