"""Pricing whole calls, with a clock that the calls move."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_errors import accelerator_error
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.plan import Cost, NodeDecision, Plan, RegionDecision
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.measuring.measure import HostTimer
from torch_hybrid_backend.measuring.timing_cache import TimingCache
from torch_hybrid_backend.partition.placement import Pricing
from torch_hybrid_backend.partition.whole_call import PricedCall
from torch_hybrid_backend.storage.store import Store

REGION = RegionDecision(
    "r0", "tvm", "key", ("mm",), (), (), (Cost("tvm", 9.0, "measured"),), (), 0.0, 8, ("matmul",), "", CPU
)
THE_PLAN = Plan("graph", "inference", (NodeDecision("mm", "aten.mm.default", "tvm", "r0", "", 8, (), CPU),), (REGION,))


class Race:
    """A call whose first input is its size, run as planned or in eager; running moves the clock, by what `us` says of that size."""

    def __init__(
        self,
        planned_us: Callable[[int], float],
        eager_us: Callable[[int], float],
        sizes: tuple[int, ...] = (),
        cache: TimingCache | None = None,
        plan: Plan = THE_PLAN,
    ) -> None:
        self.now = 0
        self.us = {"plan": planned_us, "eager": eager_us}
        self.runs: list[str] = []
        self.told: list[Plan] = []
        self.fails: set[str] = set()
        self.fails_once = False
        self.pricings = 0
        self.plan = plan
        self.call = PricedCall(
            lambda *i: self.run("eager", *i), None, "key", sizes, 0.01, self.pricing, self.told.append
        )
        self.cache = cache
        self.installed = self.call.around(self.planned)

    def pricing(self) -> Pricing:
        self.pricings += 1
        return Pricing(self.cache, {"tvm": "1"}, timer=HostTimer(lambda: self.now))

    def planned(self, *inputs: Any) -> str:
        if "plan" not in self.runs:
            self.call.take_plan(self.plan)
        return self.run("plan", *inputs)

    def run(self, who: str, size: int = 1, *_: Any) -> str:
        if who in self.fails:
            if self.fails_once:
                self.fails.clear()
            raise RuntimeError(f"{who} fails")
        self.runs.append(who)
        self.now += int(self.us[who](size) * 1000)
        return who

    def __call__(self, size: int = 1) -> str:
        """Count the runner of a call."""
        result: str = self.installed(size)
        return result


def _race(planned_us: float, eager_us: float, cache: TimingCache | None = None) -> Race:
    return Race(lambda _: planned_us, lambda _: eager_us, cache=cache)


def test_what_leaves_a_device_unusable_is_raised() -> None:
    """Elsewhere what fails while it is timed leaves the plan in place; after this nothing would run."""

    class Broken(Race):
        def run(self, who: str, size: int = 1, *_: Any) -> str:
            if who == "eager":
                raise accelerator_error("CUDA error: an illegal memory access was encountered", 700)
            return super().run(who, size)

    with pytest.raises(torch.AcceleratorError):
        Broken(lambda _: 100.0, lambda _: 60.0)()


def test_a_plan_that_loses_is_not_used() -> None:
    """Every call is eager's, the first one included; the plan told of keeps what its regions decided."""
    race = _race(planned_us=100.0, eager_us=60.0)
    assert [race() for _ in range(3)] == ["eager", "eager", "eager"]
    (plan,) = race.told
    assert plan.call is not None
    assert (plan.call.engine, plan.regions) == ("eager", (REGION,))
    assert plan.call.costs == (Cost("plan", 100.0, "measured"), Cost("eager", 60.0, "measured"))
    (refusal,) = plan.call.refusals
    assert (refusal.engine, refusal.code) == ("plan", Reason.NOT_PROFITABLE)
    assert refusal.why == "a call takes 100.0 us, in eager 60.0 us"
    assert [node.engine for node in plan.nodes] == ["eager"]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("eager_us", [100.0, 300.0])
def test_a_plan_that_does_not_lose_is_used(eager_us: float) -> None:
    """Also where both take as long."""
    race = _race(planned_us=100.0, eager_us=eager_us)
    assert [race() for _ in range(3)] == ["plan"] * 3
    (plan,) = race.told
    assert plan.call is not None
    assert (plan.call.engine, plan.call.refusals, plan.nodes) == ("plan", (), THE_PLAN.nodes)


def test_the_plan_is_let_go_of() -> None:
    """Packed weights and kernels of a plan that lost are not kept."""
    race = _race(planned_us=100.0, eager_us=60.0)

    class Planned:
        def __call__(self, *inputs: Any) -> str:
            return race.planned(*inputs)

    planned = Planned()
    race.call.around(planned)
    there = weakref.ref(planned)
    del planned
    race()
    gc.collect()
    assert there() is None
    assert race() == "eager"


def test_a_second_process_does_not_time_again(tmp_path: Path) -> None:
    """The verdict is taken from the cache, for the same plan alone."""
    cache = TimingCache(Store(tmp_path), lambda device: "machine")
    assert [_race(100.0, 60.0, cache)() for _ in range(2)] == ["eager"] * 2
    again = _race(1.0, 60.0, cache)
    assert [again(), again()] == ["eager", "eager"]
    assert again.runs == ["plan", "eager", "eager"]
    assert again.told[0].call is not None
    assert {cost.kind for cost in again.told[0].call.costs} == {"cached"}
    other = Plan("graph", "inference", (), ())
    race = Race(lambda _: 1.0, lambda _: 60.0, cache=cache, plan=other)
    assert [race(), race()] == ["plan", "plan"]


def test_long_calls_are_repeated_little() -> None:
    """Calls longer than the budget are timed once each, and the one that was chosen runs once more."""
    race = _race(planned_us=200_000.0, eager_us=400_000.0)
    race()
    assert race.runs == ["plan", "plan", "eager", "plan"]


def test_sizes_that_vary() -> None:
    """Eager, faster by overhead, is left when calls grow: they are priced each time they have doubled, until the plan wins one."""
    race = Race(lambda size: 100.0 + size, lambda size: 20.0 * size, sizes=(0,))
    assert [race(2), race(2), race(1), race(3)] == ["eager", "eager", "eager", "eager"]
    assert race.pricings == 1
    assert [race(4), race(4), race(7)] == ["eager", "eager", "eager"]
    assert race.pricings == 2
    assert [race(8), race(8), race(5), race(4), race(100)] == ["plan", "plan", "plan", "eager", "plan"]
    assert race.pricings == 3
    assert [plan.call.engine for plan in race.told if plan.call is not None] == ["eager", "eager", "plan"]
    assert race.told[-1].nodes == THE_PLAN.nodes


def test_a_plan_that_wins_runs_all_sizes() -> None:
    """A plan that wins is not priced again, whatever sizes come."""
    race = Race(lambda size: 10.0, lambda size: 20.0 * size, sizes=(0,))
    assert [race(size) for size in (2, 1, 64, 0)] == ["plan"] * 4
    assert race.pricings == 1


@pytest.mark.parametrize("who", ["plan", "eager"])
def test_a_call_that_fails_while_timed(who: str) -> None:
    """The plan that worked goes on; the plan is told of all the same."""
    race = _race(planned_us=100.0, eager_us=60.0)
    original = race.pricing

    def failing() -> Pricing:
        race.fails.add(who)
        return original()

    race.call._pricing = failing
    race.fails_once = True
    assert race() == "plan"
    assert race() == "plan"
    assert race.told == [THE_PLAN]
    assert race.pricings == 1


def test_an_interrupted_pricing_is_made_up_for() -> None:
    """Ctrl-C while calls are timed reaches the user, and the next call prices."""
    race = _race(planned_us=100.0, eager_us=60.0)
    original = race.call._pricing

    def interrupted() -> Pricing:
        raise KeyboardInterrupt

    race.call._pricing = interrupted
    with pytest.raises(KeyboardInterrupt):
        race()
    race.call._pricing = original
    assert [race(), race()] == ["eager", "eager"]


def test_a_plan_made_anew_is_told_with_the_decision() -> None:
    """A region that fails later is in the plan that is told of then."""
    race = _race(planned_us=10.0, eager_us=60.0)
    race()
    other = Plan("graph", "inference", (), ())
    race.call.take_plan(other)
    first, second = race.told
    assert (second.call, second.regions) == (first.call, ())


def test_threads_price_once() -> None:
    """Calls from many threads at once get results, and one of them prices."""
    race = _race(planned_us=100.0, eager_us=60.0)
    start = threading.Barrier(8)
    results: list[str] = []

    def work() -> None:
        start.wait()
        results.extend(race() for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 400
    assert race.pricings == 1
    assert len(race.told) == 1
    assert race() == "eager"


def test_eager_that_returns_something_else_takes_no_calls() -> None:
    """Eager is compared with the graph run node by node, and loses where they differ, however fast it is."""
    plan = dataclasses.replace(THE_PLAN)
    told: list[Plan] = []

    def planned(x: torch.Tensor) -> torch.Tensor:
        call.take_plan(plan)
        return x.neg()

    call = PricedCall(lambda x: x, torch.neg, "key", (), 0.01, lambda: Pricing(None, {"tvm": "1"}), told.append)
    installed = call.around(planned)
    for _ in range(3):
        assert installed(torch.ones(2)).tolist() == [-1, -1]
    assert told[-1].call is not None
    (refusal,) = told[-1].call.refusals
    assert (refusal.engine, refusal.code) == ("eager", Reason.ACCURACY)
    assert "output 0 differs by up to 2" in refusal.why
