"""The benchmark's probe: a real engine is built; a fake runs, as there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.tensorrt import BuildCount, Probe, probed
from tests.engines.tensorrt.contexts_for_tests import FakeEngine, FakeStream, FakeStreams, computing
from tests.engines.tensorrt.regions_for_tests import engine, region
from tests.services_for_tests import services
from torch_hybrid_backend.bench.worker import State
from torch_hybrid_backend.engines.tensorrt.installed import NO_GPU
from torch_hybrid_backend.errors import CompileError

pytestmark = pytest.mark.tensorrt


def test_the_probe_builds_runs_compares_and_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of TensorRT, or a wrong result, is the reason why the probe fails."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    x, w = torch.ones(256, 512), torch.ones(512, 128)
    built = region(lambda x, w: torch.relu(x @ w) + 1, x, w)
    fake = FakeEngine(compute=computing(built))
    count, given = BuildCount(), services(tmp_path)
    made = engine(given, load=lambda plan, device: fake, streams=lambda device: FakeStreams(FakeStream(7)))
    figures = probed(made, given, "cpu")
    assert figures["build_s"] > 0
    assert min(figures["engine_us"], figures["eager_us"]) > 0
    assert int(count) == 1
    fake.compute = computing(built, change=lambda result: result + 1)
    with pytest.raises(CompileError, match="wrong answer"):
        probed(made, given, "cpu")

    def refuse(plan: bytes, device: object) -> FakeEngine:
        raise CompileError("TensorRT does not load the engine: SM 90 is not supported")

    with pytest.raises(CompileError, match="SM 90 is not supported"):
        probed(engine(given, load=refuse), given, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    """The message names what is installed, and the one thing that is missing."""
    answer = Probe("cpu").answer(State())
    assert "torch-tensorrt" in answer["installed"]
    assert answer["gap"] == NO_GPU.why
