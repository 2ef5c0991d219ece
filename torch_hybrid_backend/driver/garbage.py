"""Python's garbage collector, held back while this backend compiles a graph and in that graph's first call.

A compilation makes hundreds of thousands of objects that stay, beside those of torch that are there already: every full collection walks
them all and finds nothing. ResNet-50, seconds: of the 1.06 that AOTAutograd took, 0.35; one collection in the graph's first call 0.30.

Not while Dynamo traces: it does not say for which backend, and others' compilations are not ours to change. Nothing is lost by that. Held
until Dynamo has ended, the one full collection that comes in its trace comes right after (docs/performance.md).

From torch 2.15 on Dynamo holds full collections back itself. Then they are held by Dynamo's own means: two that both put back what they found
would leave the other's threshold behind where threads overlap.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from torch_hybrid_backend.torch_private import deferred_full_gc

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


_full_collections = FullCollections()


@contextlib.contextmanager
def full_collections_held() -> Iterator[None]:
    """No full collection inside: around a graph's first call."""
    dynamos = deferred_full_gc()
    with _full_collections.held() if dynamos is None else dynamos():
        yield
