"""The deadline of a graph: what counts, and what does not."""

from __future__ import annotations

from torch_hybrid_backend.core.deadline import Deadline


class Clock:
    """Moved by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_only_compiling_counts() -> None:
    """Hours may pass between a compilation and the first call: what is left stays left."""
    clock = Clock()
    deadline = Deadline(10.0, clock)
    clock.now += 3600
    assert (deadline.left_s(), deadline.is_over()) == (10.0, False)
    with deadline.running():
        clock.now += 4
        assert deadline.left_s() == 6.0
        clock.now += 1
    clock.now += 3600
    assert deadline.left_s() == 5.0
    with deadline.running():
        clock.now += 2
    assert (deadline.left_s(), deadline.limit_s) == (3.0, 10.0)


def test_over_is_over() -> None:
    """Nothing is left, never less than nothing; also after an exception."""
    clock = Clock()
    deadline = Deadline(10.0, clock)
    try:
        with deadline.running():
            clock.now += 11
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        clock.now += 1
    assert (deadline.left_s(), deadline.is_over()) == (0.0, True)


def test_a_second_counts_once() -> None:
    """However many compile in it: engines enter inside of the wiring, and a branch's first call may compile in another thread."""
    clock = Clock()
    deadline = Deadline(10.0, clock)
    first, second = deadline.running(), deadline.running()
    first.__enter__()
    clock.now += 1
    second.__enter__()
    clock.now += 1
    first.__exit__(None, None, None)  # threads end in any order
    clock.now += 1
    second.__exit__(None, None, None)
    clock.now += 1
    assert deadline.left_s() == 7.0
