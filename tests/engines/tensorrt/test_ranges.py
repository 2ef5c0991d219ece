"""Sizes known only at run time: the range for which an engine is built, its optimization profile, and who runs sizes inside and outside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt.contexts_for_tests import FakeEngine, FakeStream, FakeStreams, computing
from tests.engines.tensorrt.regions_for_tests import built, engine, region
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, PendingRegion
from torch_hybrid_backend.core.region import PartitionedGraph, Region
from torch_hybrid_backend.engines.tensorrt.engine import TensorRTEngine
from torch_hybrid_backend.engines.tensorrt.ranges import MAX_GROWTH, ranges_of
from torch_hybrid_backend.engines.tensorrt.runtime import scratch_buffer_bytes
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.partition.ranged_region import RangedRegion
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.runtime.executor import Executor
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.plan_layout import PlanLayout
from torch_hybrid_backend.runtime.symbolic_executor import SymbolicExecutor

pytestmark = pytest.mark.tensorrt

F = torch.nn.functional
SCRATCH = (5000, 3000)


def chain(x: torch.Tensor) -> torch.Tensor:
    """Two regions of the engine, before and after an operator that the engine lacks."""
    y = torch.special.bessel_j0(x.relu() * 3)
    return y.neg() - 2


class Others(CompiledRegionBase):
    """Another engine's region, which counts its calls."""

    def __init__(self, of: Region) -> None:
        self._of = of
        self.calls = 0

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        with torch.no_grad():
            return list(self._of.graph_module(*inputs))


class Chain:
    """`chain` with symbolic sizes as a plan of recording engines, with `Others` beside each."""

    def __init__(self, folder: Path) -> None:
        graph = make_fx(lambda x: (chain(x),), tracing_mode="symbolic")(torch.randn(5, 6))
        graph.graph.eliminate_dead_code()
        self.graph: PartitionedGraph = partition_graph(graph, [engine()], Config(min_region_nodes=1)).graph
        taken = [s.region for s in self.graph.segments if s.engine_hint == "tensorrt"]
        assert len(taken) == len(SCRATCH)
        self.fakes = [FakeEngine(size, compute=computing(each)) for size, each in zip(SCRATCH, taken, strict=True)]
        left = iter(self.fakes)
        made = engine(
            folder,
            entry="tests.engines.tensorrt.contexts_for_tests:build_named",
            load=lambda plan, device: next(left),
            streams=lambda device: FakeStreams(FakeStream(7)),
        )
        self.others = [Others(each) for each in taken]
        regions = compiled_by(made, *taken)
        self.ranged = [
            RangedRegion(each, inside, "another", other)
            for each, inside, other in zip(taken, regions, self.others, strict=True)
        ]
        by_name = {each.region.name: each for each in self.ranged}
        self.run = SymbolicExecutor(
            self.graph, [by_name.get(s.region.name, s.region.eager) for s in self.graph.segments]
        )

    def check(self, rows: int, columns: int = 6) -> None:
        x = torch.randn(rows, columns)
        (result,) = self.run([x])
        torch.testing.assert_close(result, chain(x))

    @property
    def ran(self) -> tuple[list[int], list[int]]:
        """Number of runs of each engine, and of each of the others."""
        runs = [
            sum(call[0] == "execute_async_v3" for context in fake.contexts for call in context.calls)
            for fake in self.fakes
        ]
        return runs, [each.calls for each in self.others]


def compiled_by(made: TensorRTEngine, *regions: Region) -> list[CompiledRegion]:
    """The engine's results for the regions after all builds."""
    results: list[CompiledRegion] = []
    for each in made.compile(regions, Deadline(120.0)):
        assert not isinstance(each, Exception), each
        if isinstance(each, PendingRegion):
            done = threading.Event()
            each.when_done(done.set)
            assert done.wait(120.0)
            results.append(each.result())
        else:
            results.append(each)
    return results


@pytest.fixture
def built_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A counter of C++ plans laid out."""
    made: list[int] = []
    plain = Executor.__init__

    def counting(self: Executor, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        made.append(len(self.layout.steps))

    monkeypatch.setattr(Executor, "__init__", counting)
    return made


def test_ranges_come_from_what_is_known_of_a_size() -> None:
    """The range goes from a size's least value to a stated multiple of its example."""
    made = region(lambda x: x.relu().reshape(x.shape[0], -1), torch.ones(5, 6, 7), dynamic=True)
    ranges = ranges_of(made)
    assert sorted(r.typical for r in ranges.values()) == [5, 6, 7]
    assert all(r.least in (1, 2) and r.most == MAX_GROWTH * 8 for r in ranges.values())
    assert ranges_of(region(lambda x: x.relu(), torch.ones(3))) == {}


def test_sizes_that_alternate_build_nothing(tmp_path: Path, built_plans: list[int]) -> None:
    """Each set of sizes has one plan, laid out at its first call. The same two engines serve all plans."""
    made = Chain(tmp_path)
    for rows in (5, 64, 5, 64, 3, 5, 3):
        made.check(rows)
    assert len(built_plans) == made.run.plans == 3
    assert made.ran == ([7, 7], [0, 0])
    assert all(len(fake.contexts) == 1 for fake in made.fakes)


def test_outside_the_range_another_cover_runs_and_inside_the_engine_again(
    tmp_path: Path, built_plans: list[int]
) -> None:
    """Engines do not run at sizes for which they were not built, whichever dimension it is."""
    made = Chain(tmp_path)
    made.check(64)
    assert made.ran == ([1, 1], [0, 0])
    made.check(65)
    made.check(5, 1000)
    assert made.ran == ([1, 1], [2, 2])
    made.check(64)
    made.check(65)
    assert made.ran == ([2, 2], [3, 3])
    assert len(built_plans) == made.run.plans == 3


def test_a_plan_needs_the_largest_working_memory_not_the_sum(tmp_path: Path) -> None:
    """At every size, working memory suffices for the largest size of the range and the engine that needs most."""
    made = Chain(tmp_path)
    for rows in (2, 64):
        made.check(rows)
        layout = made.run._plans.items()[-1][1].layout  # type: ignore[attr-defined]
        assert _peak_scratch(layout) == scratch_buffer_bytes(max(SCRATCH))
    told = [call for fake in made.fakes for context in fake.contexts for call in context.calls]
    assert [call[2] for call in told if call[0] == "set_device_memory"] == [s for s in SCRATCH for _ in range(2)]
    made.check(65)  # others need none
    assert _peak_scratch(made.run._plans.items()[-1][1].layout) == 0  # type: ignore[attr-defined]


def _peak_scratch(layout: PlanLayout) -> int:
    """The most bytes of working memory in use at once. A plan allocates a value in the first step that uses it, and frees it after the last."""
    scratch = {n for n, each in enumerate(layout.values) if each.spec.dtype == "uint8"}
    assert all(layout.values[n].kind in (ValueKind.FRESH, ValueKind.ARENA) for n in scratch)
    touched: dict[int, list[int]] = {n: [] for n in scratch}
    for time, planned in enumerate(layout.steps):
        for number in {*planned.step.memory, *(t.buffer for t in planned.step.tensors)} & scratch:
            touched[number].append(time)
    return max(
        (
            sum(layout.values[n].spec.size_bytes for n, at in touched.items() if min(at) <= time <= max(at))
            for time in range(len(layout.steps))
        ),
        default=0,
    )


def test_a_region_from_python_asks_shapes(tmp_path: Path) -> None:
    """Inside the range the engine runs, outside another one. Without another engine, the error names the size."""
    made = Chain(tmp_path)
    ranged = made.ranged[0]

    def inputs(rows: int) -> list[Any]:
        x = torch.randn(rows, 6)
        return [x if each.spec is not None else rows for each in ranged.region.inputs]

    for rows in (64, 65, 3):
        ranged(inputs(rows))
    assert made.ran == ([2, 0], [1, 0])
    with pytest.raises(HybridError, match=r"from \d to 64, not 65"):
        ranged.inside(inputs(65))
    assert ranged.note.endswith("and another other sizes")


PROFILES: list[tuple[str, Callable[..., Any], tuple[int, ...]]] = [
    ("pointwise and reduction", lambda x: F.gelu(x).reshape(x.shape[0], -1).mean(1), (5, 6, 7)),
    ("other order", lambda x: x.transpose(1, 2).contiguous() * 2, (5, 6, 7)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("function", "shape"), [case[1:] for case in PROFILES], ids=[case[0] for case in PROFILES])
def test_the_profile_of_a_built_engine(
    function: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The builder gets one profile, with the least, typical and most shapes of the range, and builds an engine. Sizes of outputs are
    dynamic."""
    from torch_hybrid_backend.engines.tensorrt import adapter

    seen: list[tuple[list[list[int]], list[list[int]], str, list[int]]] = []
    plain = adapter._Interpreter._populate_trt_builder_config

    def looking(self: Any) -> Any:
        config = plain(self)
        assert config.num_optimization_profiles == 1
        (profile,) = self.optimization_profiles
        assert bool(profile), "TensorRT takes it for incomplete"
        network = self.ctx.net
        assert network.num_inputs == 1
        entering = network.get_input(0)
        shapes = [list(each) for each in profile.get_shape(entering.name)]
        seen.append((shapes, [list(entering.shape)], str(entering.dtype), list(network.get_output(0).shape)))
        return config

    monkeypatch.setattr(adapter._Interpreter, "_populate_trt_builder_config", looking)
    made = region(function, torch.ones(shape, dtype=dtype), dynamic=True)
    (spec,) = (each.spec for each in made.inputs if each.spec is not None)
    ranges = ranges_of(made)
    engine_made = built(made)
    ((shapes, entering, kind, leaving),) = seen
    wanted = [[getattr(ranges[str(size)], which) for size in spec.shape] for which in ("least", "typical", "most")]
    assert shapes == wanted
    assert shapes[1:] == [list(shape), [MAX_GROWTH * 8] * len(shape)]
    assert entering == [[-1] * len(shape)]
    assert kind == {"float32": "DataType.FLOAT", "float16": "DataType.HALF", "bfloat16": "DataType.BF16"}[spec.dtype]
    assert all(size == -1 for size in leaving)
    assert engine_made.plan
    assert engine_made.inputs == ("input0",)
