"""Graph breaks: where Dynamo leaves a model's code to Python, why, and what to change.

    print(x)        Failed to trace builtin operator     -> one graph before the line, another after it

Dynamo tells each break to its logger `graph_breaks`, also those after which it leaves the rest of a function to Python; its other records
(`torch._dynamo.utils.graph_break_reasons`) lack these.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_hybrid_backend.core.plan import GraphBreak
from torch_hybrid_backend.torch_private import graph_breaks_logger

_TOLD = re.compile(
    r"Graph break .*?in user code at (?P<file>.+?):(?P<line>\d+)\nGraph Break Reason: (?P<reason>.*?)(?:\n\nUser code traceback:|\Z)",
    re.DOTALL,
)
# What stands before the reason: of a break after which nothing of the function is compiled, and of any.
_LAST = re.compile(
    r"(?:Failed to handle graph break|Encountered graph break that we cannot resume from).*?encountered:\s*", re.DOTALL
)
_ATTEMPT = re.compile(r"Encountered graph break when attempting to trace [^\n]*\s*")
# Hints that change nothing in the user's code.
_FOR_PYTORCH = re.compile(r"\b(?:file|report) an issue\b|^This graph break is fundamental", re.IGNORECASE)


@contextlib.contextmanager
def telling_graph_breaks(tell: Callable[[GraphBreak], None]) -> Iterator[None]:
    """Have `tell` called with each graph break that Dynamo meets in this thread meanwhile."""
    logger = graph_breaks_logger()
    handler = _Handler(tell)
    level, propagate = logger.level, logger.propagate
    if not logger.isEnabledFor(logging.DEBUG):  # nobody else has asked for them
        logger.propagate = False
        logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _Handler(logging.Handler):
    def __init__(self, tell: Callable[[GraphBreak], None]) -> None:
        super().__init__(logging.DEBUG)
        self._tell = tell
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        found = graph_break(record.getMessage()) if record.thread == self._thread else None
        if found is not None:
            self._tell(found)


def graph_break(message: str) -> GraphBreak | None:
    """The graph break that a message of Dynamo's tells of; None for another message."""
    told = _TOLD.search(message)
    if told is None:
        return None
    last = _LAST.match(told["reason"])
    reason = _ATTEMPT.sub("", told["reason"][last.end() if last else 0 :], count=1)
    summary, *lines = reason.strip().splitlines() or [""]
    code = linecache.getline(told["file"], int(told["line"])).strip()
    where = f"{Path(told['file']).name}:{told['line']}"
    explanation = " ".join(
        line.strip().removeprefix("Explanation: ") for line in lines if line.startswith("  Explanation: ")
    )
    hints = tuple(line.strip().removeprefix("Hint: ") for line in lines if line.startswith("  Hint: "))
    return GraphBreak(
        f"{where}: {code}" if code else where,
        summary.rstrip("."),
        explanation,
        tuple(hint for hint in hints if not _FOR_PYTORCH.search(hint)),
        last is not None,
    )
