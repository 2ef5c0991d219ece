"""Compilation in time: every engine of a graph has what those before it have left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, FakeRegion, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.deadline import compile_in_time
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.errors import CompileError, DeadlineError
from torch_hybrid_backend.partition.regions import partition_graph


class Clock:
    """Moved by the engines."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(FakeEngine):
    """Takes so many seconds of the test's clock to compile, and keeps what it was given."""

    keeps_deadline = True

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.given = clock, seconds, -1.0

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[Any]:
        self.given = deadline.left_s()
        self.clock.now += self.seconds
        return super().compile(regions, deadline)


class SlowStranger(Slow):
    """Written by somebody who says nothing of keeping it."""

    keeps_deadline = False


@pytest.fixture
def region() -> Region:
    (segment,) = partition_graph(trace(lambda x: x.sin(), torch.ones(2)), [FakeEngine()], Config()).graph.segments
    return segment.region


def test_the_next_engine_has_what_is_left(region: Region) -> None:
    """The deadline is one for all, whether an engine is trusted with it or not; the last, too late, is asked all the same."""
    clock = Clock()
    deadline = Deadline(10.0, clock)
    engines = [Slow(clock, 3), SlowStranger(clock, 4), Slow(clock, 5), SlowStranger(clock, 1)]
    for engine in engines:
        assert len(compile_in_time(engine, [region], deadline)) == 1
        clock.now += 100  # what happens between is no compilation
    assert [engine.given for engine in engines] == [10.0, 7.0, 3.0, 0.0]
    assert deadline.is_over()


def test_an_engine_that_hangs_is_not_waited_for(region: Region) -> None:
    """Each of its regions has a DeadlineError that says how long it had, and of how much."""
    enough = threading.Event()

    class Hanging(FakeEngine):
        def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[Any]:
            enough.wait()
            return []

    late = compile_in_time(Hanging("hanging"), [region, region], Deadline(0.25))
    enough.set()
    assert [type(error) for error in late] == [DeadlineError, DeadlineError]
    assert "hanging did not finish compiling in the 0.25 s it had of 0.25 (HYBRID_COMPILE_DEADLINE_S)" in str(late[0])


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ([], "fake returned 0 results for 1 regions"),
        ([None], "fake returned an object of type NoneType for region r0; it must be a CompiledRegion"),
        ([abs], "type builtin_function_or_method for region r0"),
    ],
)
def test_what_is_no_compiled_region_is_an_error_of_that_region(results: list[Any], why: str, region: Region) -> None:
    """An engine that returns too little, or what lacks the protocol's members, is told so."""

    class Wrong(FakeEngine):
        def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[Any]:
            return results

    (error,) = compile_in_time(Wrong(), [region], Deadline(10.0))
    assert isinstance(error, CompileError)
    assert why in str(error)


class Stumbling(FakeEngine):
    """Raises what is no CompileError for a region of exponentials, beside whatever else it is asked for."""

    keeps_deadline = True

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.asked_for: list[int] = []

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[Any]:
        self.asked_for.append(len(regions))
        if any("exp" in name for region in regions for name in region.node_names):
            raise self.error
        return super().compile(regions, deadline)


@pytest.fixture
def regions() -> list[Region]:
    """Three, the second of which has an exponential."""
    functions: list[Callable[..., Any]] = [torch.sin, torch.exp, torch.cos]
    cuts = [partition_graph(trace(each, torch.ones(2)), [FakeEngine()], Config()) for each in functions]
    return [segment.region for cut in cuts for segment in cut.graph.segments]


def test_an_error_of_one_region_costs_that_region(regions: list[Region], caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it is: the others keep the engine, and where it comes from is in the log."""
    engine = Stumbling(KeyError("no such layout"))
    with caplog.at_level(logging.INFO):
        first, second, third = compile_in_time(engine, regions, Deadline(10.0))
    assert second is engine.error
    assert isinstance(first, FakeRegion)
    assert isinstance(third, FakeRegion)
    (record,) = (record for record in caplog.records if record.name == "torch_hybrid_backend.engines.deadline")
    assert record.exc_info is not None
    assert record.exc_info[1] is engine.error


def test_a_device_that_nobody_can_use_any_more_is_not_asked_again(
    regions: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every region would fail there, whichever it was of."""
    monkeypatch.setattr("torch_hybrid_backend.engines.deadline.is_sticky", lambda error: True)
    engine = Stumbling(RuntimeError("an illegal address"))
    assert compile_in_time(engine, regions, Deadline(10.0)) == [engine.error] * 3
    assert engine.asked_for == [3]


def test_a_model_keeps_its_other_regions(caplog: pytest.LogCaptureFixture) -> None:
    """A model gets one warning, of the region that failed."""
    engine = Stumbling(KeyError("no such layout"))
    engine.refuses = ["tanh"]  # two regions, with an operator between them that is eager's
    x = torch.randn(4)
    module = trace(lambda x: (x.sin() + 1).tanh().exp() * 2, x)
    services = open_services(config := Config(cache=False, min_region_nodes=1, verify="first"))
    plans: list[Plan] = []
    captured = CapturedGraph(module, "inference", frozenset(), False)
    graph = HybridGraph(captured, Session((engine, EagerEngine()), services), config, plans.append)
    with caplog.at_level(logging.WARNING):
        (result,) = graph([x])
    assert torch.equal(result, (x.sin() + 1).tanh().exp() * 2)
    assert [record.getMessage().count("KeyError") for record in caplog.records] == [1]
    failed = [[refusal.code for refusal in decision.refusals] for decision in plans[-1].regions]
    assert failed.count([Reason.COMPILE_FAILED]) == 1
    assert engine.asked_for == [2, 1, 1]
