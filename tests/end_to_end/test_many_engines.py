"""A graph with regions of TensorRT, Triton, TVM and eager. TensorRT's builder and contexts are fakes, which compute by PyTorch's operators on
the memory they are told; Triton's programs are run by its interpreter; all else is real."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch
import torch.fx

from tests.engines.tensorrt.contexts_for_tests import FakeEngine, FakeStream, FakeStreams, computing
from tests.engines.tensorrt.fake_builder import FOLDER
from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.builds.background import wait_for_builds
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, EngineBase, PendingRegion
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest
from torch_hybrid_backend.engines.tensorrt.engine import TensorRTEngine, allows_tf32
from torch_hybrid_backend.engines.tensorrt.ranges import ranges_of
from torch_hybrid_backend.engines.triton.engine import TritonEngine
from torch_hybrid_backend.runtime.executor import Executor
from torch_hybrid_backend.services import Services

pytest.importorskip("tvm")
pytest.importorskip("triton")

_OTHERS = Refused(Reason.UNKNOWN_OPERATOR, "it is another engine's in this test")


def _is_of(node: torch.fx.Node, names: Collection[str]) -> bool:
    return getattr(node.target, "_schema", None) is not None and node.target._schema.name.partition("::")[2] in names  # type: ignore[union-attr]


def _only(engine: EngineBase, names: Collection[str]) -> EngineBase:
    """The engine for these operators alone."""
    supports = engine.supports
    engine.supports = lambda node: supports(node) if _is_of(node, names) else _OTHERS  # type: ignore[method-assign]
    return engine


class _TensorRT(TensorRTEngine):
    """Takes products and ReLUs, without TensorRT's registry; loads fakes."""

    def __init__(self, config: Config, services: Services) -> None:
        super().__init__(
            config,
            services,
            entry="tests.engines.tensorrt.fake_builder:build",
            load=self._loaded,
            streams=lambda device: FakeStreams(FakeStream(7)),
            machine=lambda device: "a GPU",
        )
        self.devices = frozenset({"cpu"})
        self.regions: dict[bytes, Region] = {}
        self.engines: list[FakeEngine] = []

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported() if _is_of(node, ("mm", "relu")) else _OTHERS

    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]:
        for region in regions:
            request = BuildRequest.of(region, ranges_of(region), tf32=allows_tf32(region))
            self.regions[request.to_bytes()] = region
        return super().compile(regions, deadline)

    def _loaded(self, plan: bytes, device: Device) -> FakeEngine:
        self.engines.append(FakeEngine(1000, compute=computing(self.regions[plan])))
        return self.engines[-1]


def _program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    product = x @ w  # TensorRT: three inputs, three results that others read
    gated, other = product.relu(), (x @ v).relu()
    weights = torch.softmax(gated, -1)  # Triton
    waves = other.sin() * weights.cos()  # TVM, of both
    ordered = torch.sort(waves, -1).values  # eager
    return torch.relu(ordered @ v.t()), torch.softmax(product, -1), waves, ordered  # TensorRT and Triton once more


def test_any_engine_beside_any_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each runs its regions, whatever values go in and out between them, in one C++ plan; the others serve until TensorRT's engines are
    built, and a second graph finds these built."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "builds").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "builds"))
    config = Config(cache_dir=tmp_path / "cache", placement="estimate", strict=True, min_region_nodes=1)
    services = open_services(config)
    tensorrt = _TensorRT(config, services)
    engines = (
        tensorrt,
        _only(TritonEngine(config, services, interpreted=True), ("_softmax",)),
        _only(TvmEngine(config, services), ("sin", "cos", "mul")),
        EagerEngine(),
    )
    x, w, v = torch.randn(8, 16), torch.randn(16, 16), torch.randn(16, 16)
    plans: list[Plan] = []

    def graph() -> HybridGraph:
        captured = CapturedGraph(trace(_program, x, w, v), "inference", frozenset(), False)
        return HybridGraph(captured, Session(engines, services), config, plans.append)

    def check(made: HybridGraph) -> None:
        for scale in (1.0, 2.0):
            exact = _program(*(value.double() for value in (x * scale, w, v)))
            for ours, theirs in zip(made([x * scale, w, v]), exact, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)

    made = graph()
    check(made)
    assert {node.engine for node in plans[0].nodes} == {"triton", "tvm", "eager"}
    (tmp_path / "builds" / "go").touch()
    assert wait_for_builds(120)
    check(made)
    assert wait_for_builds(120)
    check(made)
    assert {node.engine for node in plans[-1].nodes} == {"tensorrt", "triton", "tvm", "eager"}
    ours = [region for region in plans[-1].regions if region.engine == "tensorrt"]
    assert max(len(region.inputs) for region in ours) == 3
    assert max(len(region.outputs) for region in ours) >= 2
    assert isinstance(made._executable().run, Executor)
    ran = [len(context.calls) for engine in tensorrt.engines for context in engine.contexts]
    check(made)
    assert sum(len(context.calls) for engine in tensorrt.engines for context in engine.contexts) > sum(ran)

    again = graph()
    check(again)
    assert "tensorrt" in {region.engine for region in plans[-1].regions}
