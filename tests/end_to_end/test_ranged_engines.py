"""A graph of any sizes with a TensorRT engine for a range of them and TVM's kernels for the rest. The engine is fake; TVM is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt.contexts_for_tests import FakeContext, FakeEngine, FakeStream, FakeStreams, computing
from tests.engines.tensorrt.test_constants import _Timer as Timer
from torch_hybrid_backend.builds.background import wait_for_builds
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, PendingRegion
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Supported, Verdict
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest
from torch_hybrid_backend.engines.tensorrt.engine import TensorRTEngine, allows_tf32
from torch_hybrid_backend.engines.tensorrt.ranges import ranges_of
from torch_hybrid_backend.runtime.executor import Executor
from torch_hybrid_backend.runtime.symbolic_executor import SymbolicExecutor
from torch_hybrid_backend.services import Services


class TensorRT(TensorRTEngine):
    """For the CPU and every operator, without TensorRT; its engines take 100 us."""

    def __init__(self, config: Config, services: Services, timer: Timer) -> None:
        super().__init__(
            config,
            services,
            entry="tests.engines.tensorrt.fake_builder:build",
            load=self._loaded,
            streams=lambda device: FakeStreams(FakeStream(7)),
            machine=lambda device: "a GPU",
        )
        self.devices = frozenset({"cpu"})
        self.rows: list[int] = []  # of each call
        self._timer = timer
        self._regions: dict[bytes, Region] = {}

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported()

    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]:
        for region in regions:
            request = BuildRequest.of(region, ranges_of(region), tf32=allows_tf32(region))
            self._regions[request.to_bytes()] = region
        return super().compile(regions, deadline)

    def _loaded(self, plan: bytes, device: Device) -> FakeEngine:
        compute = computing(self._regions[plan])

        def run(context: FakeContext) -> None:
            self.rows.append(context.shapes["input0"][0])
            self._timer.spent_us = 100.0
            compute(context)

        return FakeEngine(1000, compute=run)


def _function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.softmax((x @ w.t()).sin() + x.abs(), -1),)


def _graph(folder: Path) -> tuple[Callable[[int], bool], HybridGraph, list[Plan]]:
    """A graph of any number of rows, traced with 5: whether the engine ran a call of so many, which was right; the graph, and its plans."""
    config = Config(cache_dir=folder / "cache", strict=True, min_region_nodes=1)
    timer = Timer()
    services = dataclasses.replace(open_services(config), timer=lambda device: timer)
    tensorrt = TensorRT(config, services, timer)
    weight = torch.randn(96, 96)
    traced = make_fx(_function, tracing_mode="symbolic")(torch.randn(5, 96), weight)
    traced.graph.eliminate_dead_code()
    plans: list[Plan] = []
    session = Session((tensorrt, TvmEngine(config, services), EagerEngine()), services)
    graph = HybridGraph(CapturedGraph(traced, "inference", frozenset({"w_1"}), False), session, config, plans.append)

    def check(rows: int) -> bool:
        """True if the engine ran the call."""
        before = len(tensorrt.rows)
        x = torch.randn(rows, 96)
        (found,) = graph([x, weight])
        torch.testing.assert_close(found, _function(x, weight)[0])
        return len(tensorrt.rows) > before

    return check, graph, plans


def test_an_engine_that_the_first_call_does_not_suit_is_chosen_on_one_that_does(tmp_path: Path) -> None:
    """Those on which engines are chosen, before it is built or after, are too large for it: calls go on with TVM until one is not."""
    check, _, plans = _graph(tmp_path)
    for _ in range(2):
        assert not check(1000)
        assert wait_for_builds(60)
    assert plans[-1].regions[0].engine == "tvm"
    assert any("outside of 2 to 64" in refusal.why for refusal in plans[-1].regions[0].refusals)
    chosen = len(plans)
    for _ in range(3):
        assert not check(1000)
    assert wait_for_builds(60)
    assert len(plans) == chosen  # nothing was tried in vain
    for _ in range(3):  # the engine's other form may be being built
        check(5)
        assert wait_for_builds(60)
    assert plans[-1].regions[0].engine == "tensorrt"
    assert [check(rows) for rows in (5, 64, 65)] == [True, True, False]


def test_tvm_serves_the_sizes_that_an_engine_was_not_built_for(tmp_path: Path) -> None:
    """A graph of one compilation: inside the range its plans run the engine, outside TVM's kernels, inside the engine again; sizes that were
    met before build no plan."""
    check, graph, plans = _graph(tmp_path)
    check(5)  # it may still be being built
    for _ in range(3):
        assert wait_for_builds(60)
        check(5)
    assert wait_for_builds(60)
    (region,) = plans[-1].regions
    assert region.engine == "tensorrt"
    assert region.note.endswith("from 2 to 64, and tvm other sizes")
    assert [check(rows) for rows in (5, 64, 65, 64, 1000, 5, 65)] == [True, True, False, True, False, True, False]
    run = graph._executable().run
    assert isinstance(run, SymbolicExecutor)
    assert run.plans == 4
    made = {rows: next(plan for sizes, plan in run._plans.items() if rows in sizes) for rows in (5, 64, 65, 1000)}
    plans_of = {rows: plan for rows, plan in made.items() if isinstance(plan, Executor)}
    assert {type(step.step).__name__ for step in plans_of[65].layout.steps} == {"KernelCall"}
    # TVM packs the weight, once for all of its sizes; the engine reads it as it is.
    assert plans_of[65]._constants is plans_of[1000]._constants
    assert plans_of[5]._constants is plans_of[64]._constants
    assert plans_of[64]._constants is not plans_of[65]._constants
