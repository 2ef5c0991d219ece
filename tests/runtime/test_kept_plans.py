"""Plans by sizes: made once while they are kept, and those not used for long go."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from torch_hybrid_backend.runtime import kept_plans
from torch_hybrid_backend.runtime.kept_plans import MAX_PLANS, KeptPlans, Run, Sizes


class Maker:
    """Makes plans that return their sizes, and notes which."""

    def __init__(self) -> None:
        self.made: list[Sizes] = []

    def __call__(self, sizes: Sizes) -> Run:
        self.made.append(sizes)
        return lambda inputs: list(sizes)


def test_a_plan_is_made_once_for_its_sizes() -> None:
    """And found again, whatever came between."""
    maker = Maker()
    plans: KeptPlans[Run] = KeptPlans()
    for sizes in ((1,), (2,), (1,), (2, 3), (1,)):
        assert plans.at(sizes, maker)([]) == list(sizes)
    assert maker.made == [(1,), (2,), (2, 3)]
    assert [sizes for sizes, _ in plans.items()] == [(2,), (2, 3), (1,)]
    assert len(plans) == 3


def test_those_not_used_for_long_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """By use, not by making."""
    assert MAX_PLANS == 64
    monkeypatch.setattr(kept_plans, "MAX_PLANS", 2)
    maker = Maker()
    plans: KeptPlans[Run] = KeptPlans()
    for sizes in ((1,), (2,), (1,), (3,)):
        plans.at(sizes, maker)
    assert [sizes for sizes, _ in plans.items()] == [(1,), (3,)]
    plans.at((2,), maker)
    assert maker.made == [(1,), (2,), (3,), (2,)]


def test_clearing_tells_whether_there_was_anything() -> None:
    """Whoever frees what hangs on them asks."""
    maker = Maker()
    plans: KeptPlans[Run] = KeptPlans()
    assert not plans.clear()
    plans.at((), maker)
    assert plans.clear()
    assert len(plans) == 0
    plans.at((), maker)
    assert maker.made == [(), ()]


def test_what_cannot_be_made_is_not_kept() -> None:
    """The next call tries again."""
    calls = 0

    def fails(sizes: Sizes) -> Run:
        nonlocal calls
        calls += 1
        raise ValueError

    plans: KeptPlans[Run] = KeptPlans()
    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011 (of `fails` alone)
            plans.at((1,), fails)
    assert (calls, len(plans)) == (2, 0)


def test_threads_that_meet_new_sizes_together_make_one_plan() -> None:
    """The first makes it, the others wait."""
    maker, start = Maker(), threading.Barrier(4)
    plans: KeptPlans[Run] = KeptPlans()

    def call() -> Sequence[Any]:
        start.wait(10)
        return plans.at((1,), maker)([])

    with ThreadPoolExecutor(4) as pool:
        assert [each.result(10) for each in [pool.submit(call) for _ in range(4)]] == [[1]] * 4
    assert maker.made == [(1,)]
