"""Graphs with regions that an engine builds in a process: another runs them until they are there, then engines are chosen anew."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.background_for_tests import eventually
from tests.partition.engines_for_tests import FakeEngine, FakeRegion, trace
from torch_hybrid_backend.builds.background import wait_for_builds
from torch_hybrid_backend.builds.builds import Build, Builds
from torch_hybrid_backend.builds.pending import BuildingRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, PendingRegion
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.errors import BuildCancelledError, CompileError

# A builder that waits for a file, and tells what is in it. "fails": it does.
_BUILDER = """
import json, time
from pathlib import Path

def build(request, going_on):
    told = Path(json.loads(request))
    while not (told.exists() and told.read_text()):  # whoever opens a file to write in it makes an empty one first
        if not going_on(0.5):
            raise RuntimeError("stopped")
        time.sleep(0.002)
    text = told.read_text()
    if text == "fails":
        raise ValueError("no kernel fits")
    return text.encode()
"""


class _Opaque(FakeEngine):
    """Builds its regions in a process; counts the calls of what was built."""

    def __init__(self, builds: Builds, told: Path) -> None:
        super().__init__("opaque")
        self.builds = builds
        self.told = told
        self.calls: list[str] = []
        self.made: list[Build] = []

    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]:
        return [self._started(region) for region in regions]

    def _started(self, region: Region) -> PendingRegion:
        request = json.dumps(str(self.told)).encode()
        build = self.builds.start(region.key, "opaque_builder_of_tests:build", request, 600)
        self.made.append(build)

        def load(result: bytes) -> CompiledRegion:
            if result != b"an engine":
                raise CompileError("the bytes are no engine")

            def counted(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
                self.calls.append(threading.current_thread().name)
                return outputs

            return FakeRegion(region, counted)

        return BuildingRegion(build, load)


class _Bench:
    """A graph of `sin(x @ x) + weight`, an opaque engine, and one that compiles at once."""

    def __init__(self, folder: Path, *, strict: bool = False) -> None:
        (folder / "store").mkdir(mode=0o700, exist_ok=True)
        self.config = Config(cache_dir=folder / "store", placement="estimate", strict=strict)
        self.services = open_services(self.config)
        self.engine = _Opaque(Builds(self.services.store, "engines"), folder / "told")
        self.plans: list[Plan] = []
        self.weight = torch.nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.x = torch.randn(16, 16)

    def graph(self) -> HybridGraph:
        """In the order of preference: opaque, other, eager."""
        session = Session((self.engine, FakeEngine("other"), EagerEngine()), self.services)
        module = trace(lambda x, weight: ((x @ x).sin() + weight,), self.x, self.weight)
        captured = CapturedGraph(module, "inference", frozenset({"weight_1"}), False)
        return HybridGraph(captured, session, self.config, self.plans.append)

    def check(self, graph: HybridGraph) -> None:
        """Check one call."""
        (found,) = graph([self.x, self.weight])
        torch.testing.assert_close(found, (self.x @ self.x).sin() + self.weight)

    @property
    def engines(self) -> list[str]:
        """The engines of the region, plan by plan."""
        return [plan.regions[0].engine for plan in self.plans]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Bench]:
    (tmp_path / "opaque_builder_of_tests.py").write_text(_BUILDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda **options: _Bench(tmp_path, **options)


def test_another_engine_serves_until_it_is_built(bench: Callable[..., _Bench]) -> None:
    """The plan says so. What was built is tried off the call, on the inputs of a later one, while the caller's weights change; then it is
    swapped in. Another process finds the result and need not wait."""
    one = bench()
    graph = one.graph()
    one.check(graph)
    one.check(graph)
    assert one.engines == ["other"]
    refusal = one.plans[0].regions[0].refusals[0]
    assert (refusal.engine, refusal.code) == ("opaque", Reason.BUILDING)
    assert not wait_for_builds(0.01)
    one.engine.told.write_text("an engine")
    assert wait_for_builds(60)
    assert (one.engines, one.engine.calls) == (["other"], [])
    one.check(graph)  # the sample
    one.x = one.x + 1
    one.weight.add_(1)
    one.check(graph)
    assert wait_for_builds(60)
    assert one.engines == ["other", "opaque"]
    tried = len(one.engine.calls)
    one.check(graph)
    assert set(one.engine.calls[:tried]) <= {"hybrid-build", "MainThread"}
    assert one.engine.calls[tried:] == ["MainThread"]

    again = bench()
    graph = again.graph()
    assert again.engine.made[0].done
    again.check(graph)
    assert again.engines == ["opaque"]


@pytest.mark.parametrize("told", ["fails", "other bytes"])
def test_what_cannot_be_built_is_refused(
    bench: Callable[..., _Bench], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other engine stays, the plan says why, and one warning; a failed build is not tried by the next process."""
    one = bench()
    graph = one.graph()
    one.check(graph)
    one.engine.told.write_text(told)
    assert wait_for_builds(60)
    one.check(graph)
    assert wait_for_builds(60)
    assert one.engines == ["other", "other"]
    refusal = one.plans[-1].regions[0].refusals[0]
    assert refusal.engine == "opaque"
    assert ("no kernel fits" if told == "fails" else "no engine") in refusal.why
    assert len([record for record in caplog.records if "opaque" in record.getMessage()]) == 1
    again = bench()
    again.graph()
    assert again.engine.made[0].done


def test_a_dropped_graph_cancels_its_builds(bench: Callable[..., _Bench]) -> None:
    """Nobody else wants them: their processes end, and nothing is waited for."""
    one = bench()
    graph = one.graph()
    one.check(graph)
    (build,) = one.engine.made
    eventually(lambda: build.progress == 0.5)
    assert one.engine.builds.process_ids()
    del graph
    gc.collect()
    assert wait_for_builds(60)
    eventually(lambda: not one.engine.builds.process_ids())
    assert one.engine.calls == []


def _graph_of(one: _Bench, program: Callable[[torch.Tensor], tuple[torch.Tensor]]) -> HybridGraph:
    session = Session((one.engine, FakeEngine("other"), EagerEngine()), one.services)
    captured = CapturedGraph(trace(program, one.x.sigmoid()), "inference", frozenset(), False)
    return HybridGraph(captured, session, one.config, one.plans.append)


def test_random_numbers_stay_the_callers(bench: Callable[..., _Bench]) -> None:
    """A built engine is tried with a generator of the builder's own: every call has the numbers that eager has."""
    one = bench()
    graph = _graph_of(one, lambda x: (torch.bernoulli(x) + (x @ x).sin(),))
    x = one.x.sigmoid()

    def same_numbers() -> None:
        torch.manual_seed(1)
        expected = torch.bernoulli(x) + (x @ x).sin()
        after = torch.get_rng_state()
        torch.manual_seed(1)
        torch.testing.assert_close(graph([x])[0], expected)
        assert torch.equal(torch.get_rng_state(), after)

    same_numbers()
    one.engine.told.write_text("an engine")
    assert wait_for_builds(60)
    same_numbers()
    before = torch.get_rng_state()
    assert wait_for_builds(60)
    assert torch.equal(torch.get_rng_state(), before)
    assert "opaque" in {region.engine for region in one.plans[-1].regions}
    same_numbers()


def test_a_graph_that_cannot_be_tried_twice_waits_for_nothing(bench: Callable[..., _Bench]) -> None:
    """A graph that asserts something of its input cannot be tried twice: its builds are cancelled, and what its first call chose stays."""
    one = bench()

    def program(x: torch.Tensor) -> tuple[torch.Tensor]:
        torch._assert_async(x.sum() > 0)
        return ((x @ x).sin(),)

    _graph_of(one, program)([one.x.sigmoid()])
    assert one.engine.made
    assert wait_for_builds(0)
    for build in one.engine.made:
        with pytest.raises(BuildCancelledError):
            build.result(60)
    assert "opaque" not in one.engines
