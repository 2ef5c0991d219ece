"""Changes of process-wide state by several threads at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from torch_hybrid_backend.engines.tensorrt.overlap import SharedContext


class State:
    """A state that a change saves, sets and restores."""

    def __init__(self) -> None:
        self.value = "as it was"

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        before, self.value = self.value, "changed"
        yield
        self.value = before


def test_the_last_to_go_restores_the_state() -> None:
    """A enters, B enters, A leaves: the state is still changed. B leaves: the state is restored."""
    state = State()
    change = SharedContext(state.changed)
    seen = []
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for thread, step in ((first, change.__enter__), (second, change.__enter__), (first, None), (second, None)):
            thread.submit(*([step] if step else [change.__exit__, None, None, None])).result(10)  # type: ignore[arg-type]
            seen.append(state.value)
    assert seen == ["changed", "changed", "changed", "as it was"]
    with change:
        assert state.value == "changed"
    assert state.value == "as it was"


def test_a_forked_child_has_none_of_the_threads_that_were_inside() -> None:
    """No thread of the child would restore the state."""
    state = State()
    change = SharedContext(state.changed)
    with ThreadPoolExecutor(1) as other:
        other.submit(change.__enter__).result(10)
        child = os.fork()
        if not child:
            with change:
                is_right = state.value == "changed"
            os._exit(0 if is_right and state.value == "as it was" else 1)
        assert os.waitpid(child, 0)[1] == 0
        other.submit(change.__exit__, None, None, None).result(10)
    assert state.value == "as it was"
