"""Work that is given up between two steps."""

from __future__ import annotations

import threading

import pytest

from torch_hybrid_backend.cancellation import Cancellation, Cancelled, cancellable, check, is_awaited, patience
from torch_hybrid_backend.measuring.measure import measure


def test_cancellation() -> None:
    """Inside a block, and in its thread alone, work is stopped at its next step; outside nothing is."""
    cancellation = Cancellation()
    check()
    assert is_awaited()
    assert patience(7.0) == 7.0
    with cancellable(cancellation):
        check()
        assert patience(7.0) < 1.0
        assert patience(0.01) == 0.01
        assert not is_awaited()
        cancellation.cancel()
        with pytest.raises(Cancelled):
            check()
        with pytest.raises(Cancelled):
            patience(7.0)
        others: list[float] = []
        thread = threading.Thread(target=lambda: others.append(patience(7.0)))
        thread.start()
        thread.join()
        assert others == [7.0]
    check()


def test_timing_is_given_up() -> None:
    """Between two rounds, however much of the budget is left."""
    cancellation, rounds = Cancellation(), []

    def call() -> None:
        rounds.append(1)
        if len(rounds) == 3:
            cancellation.cancel()

    with cancellable(cancellation), pytest.raises(Cancelled):
        measure([call], 3600.0, max_rounds=1_000_000)
    assert len(rounds) == 3
