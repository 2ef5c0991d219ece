"""A captured graph from its compilation to its calls, with an engine of the tests' own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, FakeRegion, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.errors import RefusedValuesError, RegionError


class _Engine(FakeEngine):
    """Takes everything, and fails in a call where `fails` says so; counts its calls."""

    fails = False
    error: Exception = RuntimeError("out of order")
    calls = 0

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [_Region(region, self) for region in regions]


class _Region(FakeRegion):
    def __init__(self, region: Region, engine: _Engine) -> None:
        super().__init__(region, lambda outputs: outputs)
        self.engine = engine

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.engine.calls += 1
        if self.engine.fails:
            raise self.engine.error
        return super().__call__(inputs)


def _function(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin()


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., HybridGraph]:
    """`_function` as a graph of `engine`'s; by estimate, so that eager is not the faster one by chance."""

    def graph(
        engine: FakeEngine, on_plan: Callable[[Plan], None] | None = None, *, strict: bool = False
    ) -> HybridGraph:
        config = Config(cache_dir=tmp_path, placement="estimate", strict=strict)
        session = Session((engine, EagerEngine()), open_services(config))
        module = trace(lambda x: (_function(x),), torch.randn(64, 64))
        return HybridGraph(CapturedGraph(module, "inference", frozenset(), False), session, config, on_plan)

    return graph


def test_the_first_call_makes_the_plan(build: Callable[..., HybridGraph]) -> None:
    """Before it there is none; it tells the plan once, and later calls run it."""
    told: list[Plan] = []
    graph, x = build(_Engine(), told.append), torch.randn(64, 64)
    assert graph.plan is None
    torch.testing.assert_close(graph([x])[0], _function(x))
    assert told == [graph.plan]
    assert [region.engine for region in told[0].regions] == ["fake"]
    torch.testing.assert_close(graph([x])[0], _function(x))
    assert len(told) == 1


def test_threads_that_call_at_once_make_one_plan(build: Callable[..., HybridGraph]) -> None:
    """The first of the threads makes the first call, the others wait and run its plan; all results are right."""
    told: list[Plan] = []
    graph, x = build(_Engine(), told.append), torch.randn(64, 64)
    meeting, found = threading.Barrier(4), []

    def call() -> None:
        meeting.wait()
        found.append(graph([x])[0])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 1
    for result in found:
        torch.testing.assert_close(result, _function(x))
    assert len(found) == 4


def test_a_region_that_fails_later_goes_to_eager(build: Callable[..., HybridGraph]) -> None:
    """The call that met the fault is right, the plan is told anew, and the engine is not asked again."""
    told: list[Plan] = []
    engine = _Engine()
    graph, x = build(engine, told.append), torch.randn(64, 64)
    graph([x])
    engine.fails = True
    torch.testing.assert_close(graph([x])[0], _function(x))
    assert [[region.engine for region in plan.regions] for plan in told] == [["fake"], ["eager"]]
    assert "out of order" in told[-1].regions[0].refusals[-1].why
    calls = engine.calls
    torch.testing.assert_close(graph([x])[0], _function(x))
    assert engine.calls == calls


@pytest.mark.parametrize("strict", [False, True])
def test_what_eager_refuses_too_is_no_fault_of_the_engine(tmp_path: Path, *, strict: bool) -> None:
    """The call raises what PyTorch does, whatever the engine raised; the engine runs the next one."""
    engine = _Engine()
    config = Config(cache_dir=tmp_path, placement="estimate", strict=strict)
    session = Session((engine, EagerEngine()), open_services(config))
    table, good, bad = torch.randn(4, 3), torch.tensor([0, 3]), torch.tensor([0, 4])
    module = trace(lambda t, i: (torch.nn.functional.embedding(i, t) + 1,), table, good)
    graph = HybridGraph(CapturedGraph(module, "inference", frozenset(), False), session, config)
    graph([table, good])
    engine.fails, engine.error = True, RefusedValuesError("a flag is set")
    with pytest.raises(IndexError, match="index out of range in self"):
        graph([table, bad])
    torch.testing.assert_close(graph([table, good])[0], table[good] + 1)  # a flag that means nothing
    engine.fails, before = False, engine.calls
    torch.testing.assert_close(graph([table, good])[0], table[good] + 1)
    assert engine.calls == before + 1
    assert graph.plan is not None
    assert [region.engine for region in graph.plan.regions] == ["fake"]


def test_in_a_first_call_nobody_checks_eager_raises(tmp_path: Path) -> None:
    """With `verify=off` eager was not asked: it is where the engine refuses the values, and the next call is a first call again."""
    engine = _Engine()
    config = Config(cache_dir=tmp_path, placement="estimate", verify="off", strict=True)
    session = Session((engine, EagerEngine()), open_services(config))
    table, good, bad = torch.randn(4, 3), torch.tensor([0, 3]), torch.tensor([0, 4])
    module = trace(lambda t, i: (torch.nn.functional.embedding(i, t) + 1,), table, good)
    graph = HybridGraph(CapturedGraph(module, "inference", frozenset(), False), session, config)
    engine.fails, engine.error = True, RefusedValuesError("a flag is set")
    with pytest.raises(IndexError, match="index out of range in self"):
        graph([table, bad])
    engine.fails = False
    torch.testing.assert_close(graph([table, good])[0], table[good] + 1)
    assert graph.plan is not None
    assert [region.engine for region in graph.plan.regions] == ["fake"]


def test_under_strict_it_raises(build: Callable[..., HybridGraph]) -> None:
    """In the first call the region is named; in a later one the caller gets the error, and the plan stays."""
    engine = _Engine()
    engine.fails = True
    with pytest.raises(RegionError, match="out of order"):
        build(engine, strict=True)([torch.randn(64, 64)])
    engine = _Engine()
    graph, x = build(engine, strict=True), torch.randn(64, 64)
    graph([x])
    engine.fails = True
    with pytest.raises(RuntimeError, match="out of order"):
        graph([x])
    engine.fails = False
    torch.testing.assert_close(graph([x])[0], _function(x))
    assert graph.plan is not None
    assert [region.engine for region in graph.plan.regions] == ["fake"]


@pytest.mark.parametrize("strict", [False, True])
def test_parameters_that_change_while_engines_are_chosen(tmp_path: Path, *, strict: bool) -> None:
    """Another thread's optimizer steps between eager's run and the engine's: the results differ, and that costs no engine its region. What runs
    afterwards uses the parameters as they are."""
    weight, x = torch.randn(8, 8), torch.randn(8, 8)
    steps = [1, 2]

    class Stepping(FakeEngine):
        """While its region runs for the first two times, the parameter changes."""

        def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
            (region,) = regions

            class Stepped(FakeRegion):
                def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                    if steps:
                        weight.add_(steps.pop())
                    return super().__call__(inputs)

            return [Stepped(region, lambda outputs: outputs)]

    config = Config(cache_dir=tmp_path, placement="estimate", strict=strict)
    session = Session((Stepping(), EagerEngine()), open_services(config))
    module = trace(lambda x, weight: ((x @ weight).sin(),), x, weight)
    captured = CapturedGraph(module, "inference", frozenset({"weight_1"}), False)
    graph = HybridGraph(captured, session, config)
    graph([x, weight])
    assert not steps
    assert graph.plan is not None
    assert [region.engine for region in graph.plan.regions] == ["fake"]
    torch.testing.assert_close(graph([x, weight])[0], (x @ weight).sin())
