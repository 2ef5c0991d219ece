"""A region whose engine serves some sizes: placement finds who runs the others, plans and calls from Python ask the range."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.partition.engines_for_tests import FakeEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase
from torch_hybrid_backend.core.program import ExternalCall, Program
from torch_hybrid_backend.core.region import PartitionedGraph, Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.measuring.measure import HostTimer
from torch_hybrid_backend.partition.placement import Choice, Pricing, choose
from torch_hybrid_backend.partition.ranged_region import RangedRegion, unserved
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.runtime.program_runner import ProgramRunner
from torch_hybrid_backend.runtime.symbolic_executor import SymbolicExecutor

MOST = 16


class Clock:
    """The only time that passes is what candidates are said to take, in microseconds."""

    def __init__(self) -> None:
        self.ns = 0


class Fake(CompiledRegionBase):
    """A region as one step, for all sizes or for up to `MOST` rows; it takes `us` and counts its calls, also those of plans."""

    native = None

    def __init__(self, of: Region, clock: Clock, us: float, *, ranged: bool = False) -> None:
        self.calls = 0
        self.released = 0
        self._of, self._clock, self._us = of, clock, us
        inputs = [each.spec for each in of.inputs if each.spec is not None]
        outputs = [spec for spec in of.outputs if spec is not None]
        tensors = [i for i, each in enumerate(of.inputs) if each.spec is not None]
        rows = str(inputs[0].shape[0])
        buffers = len(inputs) + len(outputs)
        self.program = Program(
            buffers=(*inputs, *outputs),
            inputs=tuple(tensors.index(i) if i in tensors else -1 for i in range(len(of.inputs))),
            outputs=tuple(range(len(inputs), buffers)),
            constants=(),
            steps=(ExternalCall(Runner(self), tuple(range(buffers)), len(outputs), "fake"),),
            signature=tuple(each.spec if each.spec is not None else each.size for each in of.inputs),
            ranges=((rows, 2, MOST),) if ranged else (),
        )
        self._run = ProgramRunner(self.program)

    def compute(self, tensors: Sequence[torch.Tensor]) -> None:
        self.calls += 1
        self._clock.ns += int(self._us * 1000)
        given = iter(tensors)
        x = next(given)
        rows, columns = x.shape
        wanted = [
            x if each.spec is not None else (rows if str(each.size) == str(self._rows) else columns)
            for each in self._of.inputs
        ]
        (result,) = self._of.graph_module(*wanted)
        next(given).copy_(result)

    @property
    def _rows(self) -> object:
        return next(each.spec for each in self._of.inputs if each.spec is not None).shape[0]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._run(inputs)

    def release(self) -> None:
        self.released += 1


class Runner:
    """A runner that the step of a `Fake` calls."""

    native = None

    def __init__(self, owner: Fake) -> None:
        self._owner = owner

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._owner.compute(tensors)


def _function(x: torch.Tensor) -> tuple[torch.Tensor]:
    return ((x * 2).sin() + 1,)


def _cut() -> PartitionedGraph:
    traced = make_fx(_function, tracing_mode="symbolic")(torch.randn(5, 3))
    traced.graph.eliminate_dead_code()
    return partition_graph(traced, [FakeEngine()], Config(min_region_nodes=1)).graph


class Bench:
    """A region, engines that take given times, and eager that takes `eager`."""

    def __init__(self, eager: float, **engines: float) -> None:
        self.graph = _cut()
        (segment,) = self.graph.segments
        clock = self.clock = Clock()

        class TimedEager:
            def __call__(self, inputs: Sequence[Any]) -> list[Any]:
                clock.ns += int(eager * 1000)
                return list(segment.region.graph_module(*inputs))

            run = __call__

        self.region = dataclasses.replace(segment.region, eager=TimedEager())
        self.graph = dataclasses.replace(self.graph, segments=(dataclasses.replace(segment, region=self.region),))
        self.engines = {name: Fake(self.region, clock, us, ranged=name == "ranged") for name, us in engines.items()}

    def inputs(self, rows: int) -> list[Any]:
        x = torch.randn(rows, 3)
        first = next(each.spec for each in self.region.inputs if each.spec is not None)
        sizes: Mapping[str, int] = dict(zip(map(str, first.shape), x.shape, strict=True))
        return [x if each.spec is not None else sizes[str(each.size)] for each in self.region.inputs]

    def choose(self, rows: int = 5, **options: Any) -> Choice:
        pricing = Pricing(timer=HostTimer(lambda: self.clock.ns))
        return choose(self.region, self.engines, self.inputs(rows), Config(measure_budget_s=1e-3, **options), pricing)

    def calls(self, run: Callable[[], object]) -> dict[str, int]:
        """The number of calls of each engine in a run."""
        before = {name: made.calls for name, made in self.engines.items()}
        run()
        return {name: made.calls - before[name] for name, made in self.engines.items() if made.calls > before[name]}


@pytest.mark.parametrize(
    ("eager", "others", "other"),
    [
        (900.0, {"slow": 500.0, "fast": 300.0}, "fast"),
        (200.0, {"slow": 500.0, "fast": 300.0}, "eager"),
        (900.0, {}, "eager"),
    ],
)
def test_the_cheapest_that_serves_every_size_runs_the_others(
    eager: float, others: dict[str, float], other: str
) -> None:
    """Eager among them; in plans and from Python. It is in the report, and inside the range the winner is asked again."""
    bench = Bench(eager, ranged=100.0, **others)
    choice = bench.choose()
    ranged = choice.compiled
    assert choice.decision.engine == "ranged"
    assert isinstance(ranged, RangedRegion)
    assert choice.decision.note.endswith(f" from 2 to {MOST}, and {other} other sizes")
    outside = {} if other == "eager" else {other: 1}
    plan = SymbolicExecutor(bench.graph, [ranged])
    for rows, expected in ((5, {"ranged": 1}), (17, outside), (16, {"ranged": 1}), (17, outside), (5, {"ranged": 1})):
        inputs = bench.inputs(rows)
        x = next(each for each in inputs if isinstance(each, torch.Tensor))
        found: list[list[torch.Tensor]] = []
        assert bench.calls(lambda: found.append(plan([x]))) == expected  # noqa: B023
        assert bench.calls(lambda: found.append(ranged(inputs))) == expected  # noqa: B023
        for (result,) in found:
            torch.testing.assert_close(result, _function(x)[0])
    assert plan.plans == 3
    ranged.release()
    assert [made.released for name, made in bench.engines.items() if name in ("ranged", other)] == [1] * (
        1 + (other != "eager")
    )


def test_a_winner_that_serves_every_size_needs_no_other() -> None:
    """The winner is what the engine made, alone."""
    bench = Bench(900.0, ranged=500.0, fast=300.0)
    assert bench.choose().compiled is bench.engines["fast"]


def test_without_costs_the_next_in_order_that_serves_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device for which nothing is estimated."""
    monkeypatch.setattr("torch_hybrid_backend.partition.placement.roofline", lambda device: None)
    bench = Bench(1.0, ranged=900.0, slow=500.0)
    ranged = bench.choose(placement="estimate").compiled
    assert isinstance(ranged, RangedRegion)
    assert ranged.otherwise is bench.engines["slow"]


def test_errors_of_the_other_engine_are_told_from_the_users() -> None:
    """Also where a plan calls it, as it has no program."""
    bench = Bench(900.0, ranged=100.0, fast=300.0)
    bench.engines["fast"].program = None
    ranged = bench.choose().compiled
    assert isinstance(ranged, RangedRegion)

    def fail(tensors: Sequence[torch.Tensor]) -> None:
        raise ValueError("a fault")

    bench.engines["fast"].compute = fail  # type: ignore[method-assign]
    plan = SymbolicExecutor(bench.graph, [ranged])
    plan([torch.randn(5, 3)])
    with pytest.raises(HybridError, match="ValueError: a fault"):
        plan([torch.randn(17, 3)])


def test_engines_are_not_tried_on_sizes_that_they_do_not_serve(caplog: pytest.LogCaptureFixture) -> None:
    """An engine is not tried on sizes it does not serve; nobody is warned of it."""
    bench = Bench(900.0, ranged=100.0, fast=300.0)
    with caplog.at_level(logging.WARNING):
        choice = bench.choose(rows=40)
    assert choice.decision.engine == "fast"
    (refusal,) = choice.decision.refusals
    assert (refusal.engine, refusal.code) == ("ranged", Reason.SYMBOLIC_SHAPE)
    assert refusal.why == f"this call has 40 outside of 2 to {MOST}"
    assert not caplog.records
    assert bench.engines["ranged"].calls == 0


def test_the_engine_alone_refuses_other_sizes() -> None:
    """A program says which it serves."""
    bench = Bench(900.0, ranged=100.0)
    inside: CompiledRegion = bench.engines["ranged"]
    assert not unserved(inside, bench.inputs(16))
    with pytest.raises(HybridError, match=f"17 outside of 2 to {MOST}"):
        inside(bench.inputs(17))


def test_it_passes_on_what_is_asked_of_the_engine() -> None:
    """More exact and faster forms stand in the engine's place, with the same other one beside them."""
    bench = Bench(900.0, ranged=100.0, fast=300.0)
    ranged = bench.choose().compiled
    assert isinstance(ranged, RangedRegion)
    better = bench.engines["fast"]
    ranged.inside.refine = lambda *_: better  # type: ignore[method-assign]
    ranged.inside.exact = lambda *_: None  # type: ignore[method-assign]
    refined = ranged.refine(bench.inputs(5), 0.1, Deadline(1.0))
    assert isinstance(refined, RangedRegion)
    assert (refined.inside, refined.otherwise) == (better, ranged.otherwise)
    assert ranged.exact(Deadline(1.0), 0.1) is None
    assert (ranged.form, ranged.attempts, ranged.begun(), list(ranged.texts())) == ("", (), None, [])
    assert ranged.operator_us(bench.inputs(17)) == ()
