"""Precision fallback of a region whose results are too far from eager's: the next accumulation precision is built off the call. Contexts
compute inexactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.engines.tensorrt.contexts_for_tests import FakeEngine, FakeStream, FakeStreams, computing
from tests.engines.tensorrt.regions_for_tests import engine
from tests.partition.engines_for_tests import trace
from torch_hybrid_backend import wait_for_builds
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.plan import Plan, RegionDecision
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.engines.tensorrt.precision_fallback import AccumulationPrecision
from torch_hybrid_backend.report.html import render_html
from torch_hybrid_backend.report.text import render_text

pytestmark = pytest.mark.tensorrt

BUILD = "tests.engines.tensorrt.contexts_for_tests:build_named"
FACTORS = {
    AccumulationPrecision.AS_WRITTEN: 1.03,
    AccumulationPrecision.FP32_ACCUMULATION: 0.98,
    AccumulationPrecision.FP32_LAYERS: 1.0,
}


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).softmax(-1)


class Process:
    """A process with an engine whose contexts are off by a factor for each accumulation precision, a graph, and the plans it told of. `built`:
    the precisions that were loaded, in order; `entry`: what builds."""

    def __init__(self, folder: Path, factors: Mapping[AccumulationPrecision, float], entry: str = BUILD) -> None:
        self.built: list[AccumulationPrecision] = []
        self.plans: list[Plan] = []
        self.inputs = [torch.randn(256, 256).half() for _ in range(2)]  # estimates give less to eager
        config = Config(cache_dir=folder, placement="estimate")
        services = open_services(config)
        regions: list[Region] = []

        def load(plan: bytes, device: object) -> FakeEngine:
            accumulation = AccumulationPrecision(plan.decode())
            self.built.append(accumulation)
            return FakeEngine(compute=computing(regions[-1], lambda result: result * factors[accumulation]))

        made = engine(services, entry=entry, load=load, streams=lambda device: FakeStreams(FakeStream(7)))
        self._compile: Callable[..., object] = made.compile
        made.compile = lambda found, deadline: regions.extend(found) or self._compile(found, deadline)  # type: ignore[method-assign, assignment, return-value, func-returns-value]
        session = Session((made, EagerEngine()), services)
        module = trace(lambda x, w: (function(x, w),), *self.inputs)
        captured = CapturedGraph(module, "inference", frozenset(), False)
        self.graph = HybridGraph(captured, session, config, self.plans.append)

    def settled(self) -> RegionDecision:
        """Call until no build is left; each result is eager's. Returns the last decision."""
        for _ in range(8):
            (result,) = self.graph(list(self.inputs))
            torch.testing.assert_close(result, function(*self.inputs), rtol=2e-3, atol=1e-3)
            until = time.monotonic() + 60
            while not wait_for_builds(1.0):
                assert time.monotonic() < until
        (decision,) = self.plans[-1].regions
        return decision


def errors(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    ours = [each for each in caplog.records if each.name.startswith("torch_hybrid_backend")]
    return [each.getMessage() for each in ours if each.levelname == "WARNING"]


def test_one_precision_after_another_until_one_is_accurate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Eager serves meanwhile, nobody is warned, and the report shows each error. A second process loads only the last engine, from the
    cache."""
    first = Process(tmp_path, FACTORS)
    decision = first.settled()
    assert first.built == list(AccumulationPrecision)
    assert decision.engine == "tensorrt"
    assert [attempt.how for attempt in decision.attempts] == list(AccumulationPrecision)
    assert ["relative error of 0.03" in decision.attempts[0].why, "0.02" in decision.attempts[1].why] == [True, True]
    assert decision.attempts[2].why == ""
    building = [
        r for plan in first.plans for region in plan.regions for r in region.refusals if r.code is Reason.BUILDING
    ]
    assert [r.why.partition(",")[0] for r in building] == [
        "it is being built; until then another engine runs the region",
        "it is being built with fp32 accumulation",
        "it is being built with fp32 layers",
    ]
    line = "with fp32 layers, after a relative error of 0.03 as written; a relative error of 0.02 fp32 accumulation"
    assert line in render_text(first.plans[-1:])
    assert "fp32 layers, after" in render_html(first.plans[-1:])
    assert Plan.from_json(first.plans[-1].to_json()) == first.plans[-1]
    assert not errors(caplog)

    second = Process(tmp_path, FACTORS, entry="nowhere:build")
    decision = second.settled()
    assert second.built == [AccumulationPrecision.FP32_LAYERS]
    assert decision.engine == "tensorrt"
    assert "a relative error of 0.03" in decision.attempts[0].why
    assert not errors(caplog)


def test_the_first_accurate_precision_stays(tmp_path: Path) -> None:
    """No further engine is built. NaN is a reason too: a sum of half types may overflow where eager's does not."""
    process = Process(
        tmp_path,
        {**FACTORS, AccumulationPrecision.AS_WRITTEN: float("inf"), AccumulationPrecision.FP32_ACCUMULATION: 1.0},
    )
    attempts = process.settled().attempts
    assert [each.how for each in attempts] == ["as written", "fp32 accumulation"]
    assert attempts[0].why.startswith(("a relative error of inf", "a relative error of nan"))
    assert process.built == [AccumulationPrecision.AS_WRITTEN, AccumulationPrecision.FP32_ACCUMULATION]


def test_demotion_is_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only a region for which no precision is accurate enough goes to another engine, with one warning that names all errors. Another process
    builds and runs none of its engines."""
    process = Process(tmp_path, dict.fromkeys(AccumulationPrecision, 1.05))
    decision = process.settled()
    assert decision.engine == "eager"
    assert process.built == list(AccumulationPrecision)
    (warning,) = errors(caplog)
    assert "cannot run on tensorrt: accuracy" in warning
    assert all(accumulation in warning for accumulation in AccumulationPrecision)
    caplog.clear()
    second = Process(tmp_path, dict.fromkeys(AccumulationPrecision, 1.05), entry="nowhere:build")
    decision = second.settled()
    assert second.built == []
    assert [r.code for r in decision.refusals if r.engine == "tensorrt"] == [Reason.ACCURACY]
    (warning,) = errors(caplog)
    assert "a relative error of 0.05" in warning


def test_a_run_that_fails_demotes_its_region(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A later call raises nothing and is right, as are the calls after it. One warning says what happened."""
    loaded: list[FakeEngine] = []
    process = Process(tmp_path, dict.fromkeys(AccumulationPrecision, 1.0))
    original = FakeEngine.__init__

    def kept(self: FakeEngine, *args: object, **options: object) -> None:
        original(self, *args, **options)  # type: ignore[arg-type]
        loaded.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "__init__", kept)
        assert process.settled().engine == "tensorrt"
    (fake,) = loaded
    fake.refuses = "execute_async_v3"
    assert process.settled().engine == "eager"
    (warning,) = errors(caplog)
    assert "runtime_error" in warning
    assert "TensorRT could not run an engine" in warning
