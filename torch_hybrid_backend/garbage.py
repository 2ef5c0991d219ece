"""Python's garbage collector, held back while a graph is compiled.

A compilation makes hundreds of thousands of objects that stay, beside those of torch that are there already: every full collection walks
them all and finds nothing. ResNet-50, seconds: of the 1.06 that AOTAutograd took, 0.35; of a first call of 2.9 with a full cache,
one collection in Dynamo's trace 0.25, one in the graph's first call 0.30.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from torch._dynamo.callback import callback_handler

_NEVER = (1 << 31) - 1


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection inside; afterwards as it was before. Threads that overlap end with the collector on, where it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class FullCollections:
    """Automatic collections of the oldest generation, held back while anybody holds them; the young ones go on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection inside may run somebody's finaliser
        self._holders = 0
        self._threshold = 0

    def hold(self) -> None:
        with self._lock:
            if self._holders == 0:
                young, middle, self._threshold = gc.get_threshold()
                gc.set_threshold(young, middle, _NEVER)
            self._holders += 1

    def let_go(self) -> None:
        """Undo one `hold`. A threshold that somebody has set meanwhile stays."""
        with self._lock:
            self._holders -= 1
            young, middle, oldest = gc.get_threshold()
            if self._holders == 0 and oldest == _NEVER:
                gc.set_threshold(young, middle, self._threshold)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.let_go()


full_collections = FullCollections()


def hold_while_dynamo_compiles() -> None:
    """Hold full collections whenever Dynamo compiles something, for whichever backend; until `torch._dynamo.reset()` forgets all callbacks."""
    # Where this is called, or forgotten, in the middle of a compilation one of the two calls is missing.
    running: list[object] = []

    def start(args: object) -> None:
        running.append(args)
        full_collections.hold()

    def end(_args: object) -> None:
        while running:
            running.pop()
            full_collections.let_go()

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
