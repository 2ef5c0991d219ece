"""The stages of a graph: partitionings priced on the first call's inputs, with engines and a clock of the tests' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Verdict
from torch_hybrid_backend.driver.prepared import prepare
from torch_hybrid_backend.driver.session import Session
from torch_hybrid_backend.driver.stages import (
    Assignment,
    Compiled,
    _UnlessCaptured,
    build_executable,
    partition_and_compile,
    place,
)
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.measuring.measure import HostTimer
from torch_hybrid_backend.measuring.timing_cache import TimingCache
from torch_hybrid_backend.partition import extract
from torch_hybrid_backend.partition.estimate import CALLBACK_US
from torch_hybrid_backend.partition.placement import Pricing
from torch_hybrid_backend.runtime.program_runner import ProgramRunner
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.storage.store import Store

EAGER_US = 1000.0  # of an operator


class _Clock:
    """Stands still but for what the tests' regions and eager's are said to take."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class _TimedRegion(CompiledRegionBase):
    def __init__(self, region: Region, microseconds: float, clock: _Clock) -> None:
        self._region, self._microseconds, self._clock = region, microseconds, clock

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._clock.ns += int(self._microseconds * 1000)
        return [output.clone() for output in self._region.graph_module(*inputs)]


class _TimedEngine(FakeEngine):
    """A region takes `call_us`, and each of its operators what `operator_us` says by a part of its name, else `other_us`."""

    def __init__(
        self,
        name: str,
        clock: _Clock,
        takes: Sequence[str],
        operator_us: Mapping[str, float],
        call_us: float = 1.0,
        other_us: float = 100.0,
    ) -> None:
        super().__init__(name, takes)
        self._clock, self._operator_us, self._call_us, self._other_us = clock, operator_us, call_us, other_us
        self.compiled: list[tuple[str, ...]] = []

    def version(self, device: Device) -> str:
        return "1"

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        self.compiled += [region.node_names for region in regions]
        return [
            _TimedRegion(region, self._call_us + sum(map(self._us, region.node_names)), self._clock)
            for region in regions
        ]

    def _us(self, name: str) -> float:
        return next((us for part, us in self._operator_us.items() if part in name), self._other_us)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """The clock; eager takes EAGER_US for each operator."""
    clock = _Clock()

    class TimedEager(EagerGraph):
        def __init__(self, graph_module: torch.fx.GraphModule) -> None:
            super().__init__(graph_module)
            self._ns = int(1000 * EAGER_US) * len([n for n in graph_module.graph.nodes if n.op == "call_function"])

        def __call__(self, inputs: Sequence[Any]) -> list[Any]:
            clock.ns += self._ns
            return super().__call__(inputs)

        def run(self, inputs: Sequence[Any]) -> list[Any]:
            clock.ns += self._ns
            return super().run(inputs)

    monkeypatch.setattr(extract, "EagerGraph", TimedEager)
    return clock


def _function(x: torch.Tensor) -> torch.Tensor:
    return torch.sort((x @ x).sin().exp().cos()).values


class _Wiring:
    """Stages in the order of `HybridGraph`, with the test's engines, clock and cache."""

    def __init__(self, clock: _Clock, folder: Path) -> None:
        store = Store.open(folder, enabled=True, strict=True, limit_bytes=1 << 20)
        self._timings = TimingCache(store, lambda device: "machine")
        self._services = Services(store, self._timings, ProgramRunner, lambda device: HostTimer(clock), lambda *_: None)  # type: ignore[arg-type,return-value]
        self._clock = clock
        self.config = Config(measure_budget_s=1e-3, strict=True)

    def compile(self, engines: Sequence[FakeEngine], function: Callable[..., Any] = _function) -> Compiled:
        session = Session((*engines, EagerEngine()), self._services)
        module = trace(lambda x: (function(x),), torch.randn(8, 8))
        captured = CapturedGraph(module, "inference", frozenset(), False)
        self._versions = {engine.name: engine.version(Device("cpu")) for engine in engines}
        return partition_and_compile(
            prepare(captured, "graph", self.config, lambda *_: None), session, self.config, self._pricing
        )  # type: ignore[arg-type,return-value]

    def _pricing(self, device: Device) -> Pricing:
        return Pricing(self._timings, self._versions, device, deadline=Deadline(60.0), timer=HostTimer(self._clock))

    def place(self, compiled: Compiled, function: Callable[..., Any] = _function) -> Assignment:
        """Assign engines, build the executable and call it again; both calls are right."""
        x = torch.randn(8, 8)
        assignment, (first,) = place(compiled, [x], self.config, self._pricing)
        torch.testing.assert_close(first, function(x))
        (again,) = assignment.python_executor()([x])
        torch.testing.assert_close(again, function(x))
        (executable,) = build_executable(assignment, [x], self.config).run([x])
        torch.testing.assert_close(executable, function(x))
        return assignment


@pytest.fixture
def wiring(clock: _Clock, tmp_path: Path) -> _Wiring:
    return _Wiring(clock, tmp_path)


def _regions(assignment: Assignment) -> list[tuple[str, tuple[str, ...]]]:
    """The engines and their operators, segment by segment."""
    return [
        (
            assignment.decisions[s.region.name].engine if s.region.name in assignment.decisions else "eager",
            s.region.node_names,
        )
        for s in assignment.partition.graph.segments
    ]


def test_the_partitioning_of_the_second_engine_wins(clock: _Clock, wiring: _Wiring) -> None:
    """The first engine would take what it supports and leave the second one fragments; the second one's own regions cost less."""
    first = _TimedEngine("first", clock, ["mm", "sin", "cos"], {})
    second = _TimedEngine("second", clock, ["sin", "exp", "cos"], {}, other_us=10.0)
    assignment = wiring.place(wiring.compile([first, second]))
    assert _regions(assignment)[:2] == [("first", ("mm",)), ("second", ("sin", "exp", "cos"))]
    costs = {cost.engine: cost.microseconds for cost in assignment.partitionings}
    assert costs.keys() == {"first, second", "second, first"}
    assert costs["second, first"] < costs["first, second"]
    # The product, the three others, and eager's two, whose call takes as long as two runs; each of the three segments runs from Python.
    assert costs["second, first"] == pytest.approx(101 + 31 + 2 * 2 * EAGER_US + 3 * CALLBACK_US)
    assert assignment.plan.partitionings == assignment.partitionings


def test_a_mixture_wins(clock: _Clock, wiring: _Wiring) -> None:
    """The first engine supports all of it, in one region; it costs less where it keeps the product and leaves the rest to the second one."""
    first = _TimedEngine("first", clock, ["mm", "sin", "exp", "cos"], {"mm": 5.0})
    second = _TimedEngine("second", clock, ["sin", "exp", "cos"], {}, other_us=10.0)
    assignment = wiring.place(wiring.compile([first, second]))
    assert _regions(assignment)[:2] == [("first", ("mm",)), ("second", ("sin", "exp", "cos"))]
    assert [cost.kind for cost in assignment.partitionings] == ["measured", "measured"]


def test_the_first_engine_keeps_what_it_does_best(clock: _Clock, wiring: _Wiring) -> None:
    """The second engine's partitioning loses where its operators are slow, and where every region costs a call: fewer are better."""
    first = _TimedEngine("first", clock, ["mm", "sin", "exp", "cos"], {}, call_us=50.0, other_us=10.0)
    second = _TimedEngine("second", clock, ["exp"], {"exp": 1.0}, call_us=50.0)
    assignment = wiring.place(wiring.compile([first, second]))
    assert _regions(assignment)[0] == ("first", ("mm", "sin", "exp", "cos"))


@pytest.mark.parametrize(("exp_us", "wins"), [(10.0, False), (60.0, True)])
def test_an_engine_has_to_gain_more_than_its_boundaries_cost(
    clock: _Clock, wiring: _Wiring, exp_us: float, *, wins: bool
) -> None:
    """An engine that is faster at one operator in the midst of another's region, which becomes two regions around it: what they cost more, 15
    us, counts against what it gains there."""
    inside = _TimedEngine("inside", clock, ["exp"], {"exp": 5.0}, call_us=1.0)
    around = _TimedEngine("around", clock, ["mm", "sin", "exp", "cos"], {"exp": exp_us}, call_us=20.0, other_us=10.0)
    assignment = wiring.place(wiring.compile([inside, around]))
    cut = [("around", ("mm", "sin")), ("inside", ("exp",)), ("around", ("cos",))]
    assert _regions(assignment)[:-1] == (cut if wins else [("around", ("mm", "sin", "exp", "cos"))])


def test_common_regions_are_compiled_once(clock: _Clock, wiring: _Wiring) -> None:
    """A region that several partitionings have is compiled by each engine once, and priced once."""
    first = _TimedEngine("first", clock, ["mm", "sin", "cos"], {})
    second = _TimedEngine("second", clock, ["sin", "exp", "cos"], {})
    compiled = wiring.compile([first, second])
    assert len(compiled.partitionings) == 2
    assert all(len(engine.compiled) == len(set(engine.compiled)) for engine in (first, second))
    assert ("mm",) in first.compiled


def test_an_engine_is_asked_once_about_a_common_region(clock: _Clock, wiring: _Wiring) -> None:
    """The engine may accept or refuse it; a refusal is in each partitioning's plan."""

    class Picky(_TimedEngine):
        asked_about: tuple[tuple[str, ...], ...] = ()

        def accepts(self, region: Region) -> Verdict:
            self.asked_about += (region.node_names,)
            return Refused(Reason.TOO_SMALL, "only large regions")

    first = Picky("first", clock, ["mm", "sin", "cos"], {})
    second = _TimedEngine("second", clock, ["sin", "exp", "cos"], {})
    compiled = wiring.compile([first, second])
    assert len(compiled.partitionings) == 2
    assert len(first.asked_about) == len(set(first.asked_about))
    assert first.compiled == []
    refusals = [refusal.why for decision in wiring.place(compiled).decisions.values() for refusal in decision.refusals]
    assert "only large regions" in refusals


def test_what_is_found_before_all_is_built_is_not_kept(clock: _Clock, wiring: _Wiring) -> None:
    """A region that has another form built tells so once; the partitionings are then priced again by the next process."""

    class Build:
        done = False

    class Building(_TimedEngine):
        def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
            made = super().compile(regions, deadline)
            for each in made:
                left = [Build()]
                each.begun = lambda left=left: left.pop() if left else None  # type: ignore[union-attr,method-assign,misc]
            return made

    first = Building("first", clock, ["mm", "sin", "cos"], {})
    second = _TimedEngine("second", clock, ["sin", "exp", "cos"], {}, other_us=10.0)
    compiled = wiring.compile([first, second])
    assignment = wiring.place(compiled)
    assert assignment.begun
    assert all(isinstance(each, Build) for each in assignment.begun)
    assert len(wiring.compile([first, second]).partitionings) == 2
    assert not wiring.place(compiled).begun
    assert len(wiring.compile([first, second]).partitionings) == 1


@pytest.mark.parametrize("recurs", [False, True])
def test_what_is_found_without_a_region_is_kept_where_that_fails_elsewhere_too(
    recurs: bool, clock: _Clock, wiring: _Wiring
) -> None:
    """The partitionings are priced again by the next process where this one lacked something, a full disk say."""

    class Failing(_TimedEngine):
        def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
            return [CompileError("no disk", recurs=recurs), *super().compile(regions, deadline)[1:]]

    wiring.config = dataclasses.replace(wiring.config, strict=False)
    engines = [
        Failing("first", clock, ["mm", "sin", "cos"], {}),
        _TimedEngine("second", clock, ["sin", "exp", "cos"], {}, other_us=10.0),
    ]
    assert wiring.place(wiring.compile(engines)).is_partial is not recurs
    assert (len(wiring.compile(engines).partitionings) == 1) is recurs


def test_a_second_process_compiles_the_best_partitioning_alone(clock: _Clock, wiring: _Wiring) -> None:
    """The costs of partitionings are kept: the next compilation compiles the cheapest one only, and says so in its plan."""
    first = _TimedEngine("first", clock, ["mm", "sin", "cos"], {})
    second = _TimedEngine("second", clock, ["sin", "exp", "cos"], {}, other_us=10.0)
    before = wiring.place(wiring.compile([first, second]))
    first.compiled.clear()
    second.compiled.clear()
    compiled = wiring.compile([first, second])
    assert [each.partitioning.order for each in compiled.partitionings] == [("second", "first")]
    assert first.compiled == [("mm",)]
    after = wiring.place(compiled)
    assert _regions(after) == _regions(before)
    assert {cost.kind for cost in after.partitionings} == {"cached"}


def test_a_graph_with_effects_is_run_once(clock: _Clock, wiring: _Wiring) -> None:
    """Random numbers would be drawn twice: the partitioning is the best by estimate, and no other is compiled."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like((x @ x).sin().exp().cos()) * 0 + x.sin().exp().cos()

    first = _TimedEngine("first", clock, ["mm", "sin", "cos"], {})
    second = _TimedEngine("second", clock, ["sin", "exp", "cos"], {})
    compiled = wiring.compile([first, second], noisy)
    assert len(compiled.partitionings) == 1
    torch.manual_seed(0)
    wiring.place(compiled, noisy)


def test_a_region_that_failed_goes_to_eager_in_a_new_value(clock: _Clock, wiring: _Wiring) -> None:
    """`without` leaves the stage that it was made from as it was: another thread may be running it."""
    wiring.config = Config(measure_budget_s=1e-3)
    assignment = wiring.place(wiring.compile([_TimedEngine("first", clock, ["mm", "sin", "exp", "cos"], {})]))
    (segment, *_) = assignment.partition.graph.segments
    after = assignment.without(segment.region, RuntimeError("out of order"), strict=False)
    assert assignment.decisions[segment.region.name].engine == "first"
    assert after.decisions[segment.region.name].engine == "eager"
    assert segment.region.name not in after.compiled
    assert "out of order" in after.decisions[segment.region.name].refusals[-1].why


def test_eager_runs_what_is_captured(wiring: _Wiring, clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the caller captures a CUDA graph, eager runs every segment in place of a plan that draws random numbers; constants were folded
    before. Then the plan runs again."""
    engine = _TimedEngine("mine", clock, ["mm", "sin", "exp", "cos"], {})
    assignment = wiring.place(wiring.compile([engine]))
    calls: list[str] = []

    def plan(inputs: Sequence[Any]) -> list[Any]:
        calls.append("plan")
        return [inputs[0]]

    eager = assignment.eager_executor()
    x = torch.randn(8, 8)
    eager.bind([x])
    run = _UnlessCaptured(plan, eager)
    for is_capturing in (False, True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda found=is_capturing: found)
        before = clock.ns
        (result,) = run([x])
        torch.testing.assert_close(result, _function(x) if is_capturing else x)
        assert (clock.ns > before) == is_capturing
    assert calls == ["plan", "plan"]
