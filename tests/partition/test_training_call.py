"""Pricing training steps, with a clock that the steps move."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tests.partition.test_whole_call import THE_PLAN
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.measuring.measure import HostTimer
from torch_hybrid_backend.partition.placement import Pricing
from torch_hybrid_backend.partition.training_call import PricedTraining
from torch_hybrid_backend.partition.whole_call import PLAN

FORWARD, BACKWARD = (dataclasses.replace(THE_PLAN, kind=kind) for kind in ("forward", "backward"))


class Race:
    """x * weight + dropout, forward and backward, as planned or in eager; running moves the clock."""

    def __init__(self, planned_us: int, eager_us: int, fails: bool = False) -> None:
        self.now = 0
        self.us = {PLAN: planned_us, EAGER: eager_us}
        self.runs: list[str] = []
        self.told: list[Plan] = []
        self.fails = fails
        self.call = PricedTraining(
            lambda *inputs: self.run(EAGER, *inputs),
            self.copied,
            "key",
            0.01,
            lambda: Pricing(None, {"tvm": "1"}, timer=self.timer),
        )
        self.timer = HostTimer(lambda: self.now)
        self.takers = {each.kind: self.call.taking(self.told.append) for each in (FORWARD, BACKWARD)}
        self.installed = self.call.around(lambda *inputs: self.run(PLAN, *inputs))

    def copied(self, inputs: Sequence[Any]) -> list[Any]:
        if self.fails:
            raise RuntimeError("out of memory")
        return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]

    def run(self, who: str, x: torch.Tensor, weight: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.runs.append(who)
        self.now += self.us[who] * 1000
        count += 1
        if len(self.runs) == 1:
            self.takers["forward"](FORWARD)
        return torch.nn.functional.dropout(x * weight), 3


def _steps(race: Race, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, weight, count = torch.randn(8), torch.nn.Parameter(torch.randn(8)), torch.zeros(())
    for number in range(steps):
        y, _ = race.installed(x, weight, count)
        if number == 0:
            race.takers["backward"](BACKWARD)
        y.sum().backward()
    assert weight.grad is not None
    return weight.grad, count, torch.rand(3)


def test_the_faster_runs_all_later_steps_and_nobody_notices() -> None:
    """The step that is timed leaves no trace: in gradients, in buffers, in random numbers."""
    untouched = _steps(Race(1, 1, fails=True), 4)
    for planned_us, eager_us, winner in ((900, 500, EAGER), (500, 900, PLAN), (500, 500, PLAN)):
        race = Race(planned_us, eager_us)
        assert all(map(torch.equal, _steps(race, 4), untouched))
        assert race.runs[0] == PLAN
        assert race.runs[-3:] == [winner] * 3
        assert {PLAN, EAGER} == {*race.runs[1:-3]}
        decisions = [plan.call and plan.call.engine for plan in race.told]
        assert decisions == [None, None, winner, winner]
        assert [plan.kind for plan in race.told] == ["forward", "backward"] * 2


def test_plans_go_on_where_steps_cannot_be_timed() -> None:
    """The first step has shown that they work."""
    race = Race(900, 500, fails=True)
    _steps(race, 3)
    assert race.runs == [PLAN] * 3
    assert [plan.call for plan in race.told] == [None, None]


def test_nothing_is_timed_before_a_backward_call() -> None:
    """Forward calls alone do not tell what a step takes."""
    race = Race(900, 500)
    x = torch.ones(8)
    for _ in range(3):
        race.installed(x, torch.nn.Parameter(x.clone()), torch.zeros(()))
    assert race.runs == [PLAN] * 3


def test_hooks_for_saved_tensors_see_the_users_step_alone() -> None:
    """A checkpoint counts what is saved."""
    race, seen = Race(900, 500), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        _steps(race, 3)
    assert len(seen) == 3 * 2  # the factor of a product, and the dropout's mask
