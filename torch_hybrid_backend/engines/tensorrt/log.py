"""TensorRT's messages about this package's engines, moved to this package's log.

TensorRT has one log for the process, which torch_tensorrt sends to a Python logger. Users may read messages of their own engines there. So only
the messages of threads that collect them are moved:

    log = TensorRTLog(logger)
    with log.collect() as messages: ...              # messages of this thread
    with log.collect(fully=True) as messages: ...    # at every level, for a build or a load; slow to enter
    messages.errors, messages.layers
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch_hybrid_backend.engines.tensorrt.overlap import SharedContext

_log = logging.getLogger(__name__)

_LAYER = re.compile(r"^Name: (.*?), LayerType: (\w+),(.*)", re.MULTILINE)
_PARTS = re.compile(r" (Inputs|Constants|Outputs|TacticName): ")
_DTYPE = re.compile(r"Datatype: (\w+)")


@dataclass(slots=True)
class LogMessages:
    """Messages of TensorRT: errors, and layers of engines, which without a GPU appear only in the log."""

    errors: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)

    @property
    def why(self) -> str:
        """The last errors as one text."""
        return "; ".join(self.errors[-3:]) or "TensorRT gives no reason"

    def take(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.ERROR:
            self.errors.append(message)
        if message.startswith("Layers:"):
            self.layers += [_layer(*found) for found in _LAYER.findall(message)]
        # At most INFO: the refusal says what an error means for the user.
        _log.log(min(record.levelno, logging.INFO), "TensorRT: %s", message)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.collecting: list[LogMessages] = []  # innermost last


class TensorRTLog(logging.Filter):
    """Filter that takes collected messages out of TensorRT's logger. A logger has one, as long as the process lives."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._of_thread = _OfThread()
        self._of_all: list[LogMessages] = []  # collect messages of TensorRT's own threads too
        self._user_level = logging.NOTSET  # the logger's level for records that are not collected
        self._fully = SharedContext(self._at_every_level)
        logger.addFilter(self)

    @contextlib.contextmanager
    def collect(self, *, fully: bool = False) -> Iterator[LogMessages]:
        """Collect TensorRT's messages of this thread. `fully`: at every level, and those of threads that collect none, as a builder's."""
        messages = LogMessages()
        self._of_thread.collecting.append(messages)
        try:
            if not fully:
                yield messages
                return
            with self._fully:
                self._of_all.append(messages)
                try:
                    yield messages
                finally:
                    self._of_all.remove(messages)
        finally:
            self._of_thread.collecting.pop()

    def filter(self, record: logging.LogRecord) -> bool:
        """True if nobody collects the record, and the logger's own level lets it pass."""
        collecting = self._of_thread.collecting or self._of_all
        if collecting:
            collecting[-1].take(record)
            return False
        return record.levelno >= self._user_level

    @contextlib.contextmanager
    def _at_every_level(self) -> Iterator[None]:
        before, self._user_level = self._logger.level, self._logger.getEffectiveLevel()
        self._logger.setLevel(logging.DEBUG)
        yield
        self._user_level = logging.NOTSET
        if self._logger.level == logging.DEBUG:  # otherwise the user changed the level meanwhile
            self._logger.setLevel(before)


def _layer(name: str, kind: str, rest: str) -> str:
    """A layer with the dtypes of its inputs, constants and outputs: "gemm: linear (Half, Half; Float -> Half)". TensorRT-RTX 1.4 lists no
    constants."""
    _, *parts = _PARTS.split(rest)
    types = {part: ", ".join(_DTYPE.findall(text)) for part, text in zip(parts[::2], parts[1::2], strict=True)}
    read = "; ".join(filter(None, (types.get("Inputs"), types.get("Constants"))))
    return f"{kind}: {name} ({read} -> {types.get('Outputs', '')})"


# All known releases of torch_tensorrt use this name.
tensorrt_logger = logging.getLogger("torch_tensorrt [TensorRT Conversion Context]")
tensorrt_log = TensorRTLog(tensorrt_logger)
