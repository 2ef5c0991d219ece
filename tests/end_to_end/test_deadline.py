"""HYBRID_COMPILE_DEADLINE_S is one time for one graph: all engines, its backward graph and its first call together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import torch_hybrid_backend
from tests.partition.engines_for_tests import FakeEngine, FakeRegion
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.errors import CompileError

TAKES_S = 0.2
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def no_sessions(settings: pytest.MonkeyPatch) -> None:
    """None that other tests have left, and none for them."""
    settings.setattr(session, "_sessions", {})


class _Slow(FakeEngine):
    """Takes a while, for its regions and for each one's faster form; `left`: what it had, each time, and whose deadline it was."""

    keeps_deadline = True

    def __init__(self, name: str, *, fails: bool = False) -> None:
        super().__init__(name)
        self.fails = fails
        self.left: list[float] = []
        self.deadlines: set[int] = set()

    def work(self, deadline: Deadline) -> None:
        self.left.append(deadline.left_s())
        self.deadlines.add(id(deadline))
        with deadline.running():
            time.sleep(TAKES_S)

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        self.work(deadline)
        if self.fails:
            return [CompileError("it cannot")] * len(regions)
        return [_SlowRegion(region, self) for region in regions]


class _SlowRegion(FakeRegion):
    def __init__(self, region: Region, engine: _Slow) -> None:
        super().__init__(region, lambda outputs: outputs)
        self.engine = engine

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> CompiledRegion:
        self.engine.work(deadline)
        return self


def _use(settings: pytest.MonkeyPatch, *engines: FakeEngine) -> None:
    made = tuple((engine.name, lambda config, services, engine=engine: engine) for engine in engines)
    settings.setattr(session, "ENGINES", (*made, *session.ENGINES[-1:]))


def test_engines_graphs_and_the_first_call_share_it(settings: pytest.MonkeyPatch) -> None:
    """Each compilation has what those before it left: of two engines, forward and backward, then their first calls. The next graph
    begins anew."""
    settings.setenv("HYBRID_COMPILE_DEADLINE_S", str(LIMIT_S))
    settings.setenv("HYBRID_PLACEMENT", "measure")
    settings.setenv("HYBRID_MEASURE_BUDGET_S", "0.001")
    first, second = _Slow("first", fails=True), _Slow("second")
    _use(settings, first, second)
    x = torch.randn(4, 4, requires_grad=True)
    fast = torch.compile(lambda x: (x.sin() @ x).sum(), backend="hybrid", dynamic=False)
    loss = fast(x)
    loss.backward()
    assert x.grad is not None
    assert first.deadlines == second.deadlines
    assert len(first.deadlines) == 1
    left = sorted([*first.left, *second.left], reverse=True)
    assert (len(first.left), len(second.left)) == (2, 4)  # forward and backward; and the first call of each
    assert left[0] > LIMIT_S - TAKES_S
    for before, after in itertools.pairwise(left):
        assert after <= before - TAKES_S
    other = torch.compile(lambda x: x.cos(), backend="hybrid", dynamic=False)
    with torch.no_grad():
        other(torch.randn(3))
    assert first.left[-1] > LIMIT_S - TAKES_S


def test_late_kernels_leave_the_region_to_eager(tmp_path: Path, settings: pytest.MonkeyPatch) -> None:
    """An engine that takes all the time leaves none to the next: its kernels are late, the plan says so, and the answer is right. Kernels
    that the cache has need no time."""
    pytest.importorskip("tvm")
    greedy = _Slow("greedy", fails=True)
    settings.setattr(session, "ENGINES", (("greedy", lambda config, services: greedy), *session.ENGINES))
    x = torch.randn(8, 8)
    answers: list[torch.Tensor] = []

    def found(**options: object) -> tuple[str, dict[str, Reason]]:
        settings.setattr(session, "_sessions", {})
        with torch.no_grad():
            explanation = torch_hybrid_backend.explain(
                lambda x: answers.append(x.sin() @ x), x, options={"cache_dir": tmp_path / "cache", **options}
            )
        torch.testing.assert_close(answers[-1], x.sin() @ x, rtol=1e-4, atol=1e-4)
        ((region,),) = (plan.regions for plan in explanation.plans)
        return region.engine, {refusal.engine: refusal.code for refusal in region.refusals}

    late = {"greedy": Reason.COMPILE_FAILED, "tvm": Reason.DEADLINE}
    assert found(compile_deadline_s=TAKES_S) == ("eager", late)
    assert found(compile_deadline_s=LIMIT_S, disable_engines="greedy") == ("tvm", {})
    assert found(compile_deadline_s=TAKES_S) == ("tvm", {"greedy": Reason.COMPILE_FAILED})
