"""Weights as constants of engines: when they are used, what a change of weights does, and their budget. Engines are fake and compute with the
constants they were built with, so a stale engine gives a wrong result. Builds run in processes, as always."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx

from tests.background_for_tests import eventually
from tests.engines.tensorrt import fake_builder
from tests.engines.tensorrt.contexts_for_tests import (
    FakeContext,
    FakeEngine,
    FakeStream,
    FakeStreams,
    computing_request,
)
from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.builds.background import Job, build_thread, wait_for_builds
from torch_hybrid_backend.builds.builds import Build
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest
from torch_hybrid_backend.engines.tensorrt.constants import MOST_CHANGES, Budget, ConstantForm, positions_of
from torch_hybrid_backend.engines.tensorrt.engine import TensorRTEngine
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.runtime.constants import refresh


class _Engine(TensorRTEngine):
    """An engine for the CPU that takes every operator but `sin`, without asking TensorRT."""

    devices = frozenset({"cpu"})

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Refused(Reason.UNKNOWN_OPERATOR, "no sin") if "sin" in str(node.target) else Supported()


class _Timer:
    """A timer that returns the time the engine of a call reported, and 1000 us for other calls."""

    def __init__(self) -> None:
        self.spent_us = 0.0
        self.ticks = 0

    def now(self) -> int:
        self.ticks += 10**6
        return self.ticks

    def round(self, calls: Sequence[Callable[[], object]]) -> list[int]:
        spent = []
        for call in calls:
            self.spent_us = 1000.0
            call()
            spent.append(int(self.spent_us * 1000))
        return spent


class Bench:
    """Engines that take 100 us for a region with weights as inputs, and `constants_us` with constants. `ran`: number of constants of the
    engine, for each run."""

    def __init__(self, folder: Path, percent: int = 100, **settings: object) -> None:
        (folder / "store").mkdir(mode=0o700, exist_ok=True)
        config = Config(cache_dir=folder / "store", tensorrt_constants_percent=percent)
        self.config = dataclasses.replace(config, **settings)  # type: ignore[arg-type]
        self.timer = _Timer()
        self.services = dataclasses.replace(open_services(self.config), timer=lambda device: self.timer)
        self.constants_us: Callable[[BuildRequest], float] = lambda request: 50.0
        self.scratch_bytes: Callable[[BuildRequest], int] = lambda request: 64
        self.off_by = 0.0
        self.ran: list[int] = []
        self.loaded: list[FakeEngine] = []
        self.streams = FakeStreams(FakeStream(7))
        self.engine = _Engine(
            self.config,
            self.services,
            entry="tests.engines.tensorrt.fake_builder:build",
            load=lambda plan, device: self.load(plan),
            streams=lambda device: self.streams,
            machine=lambda device: "a GPU",
        )
        self.plans: list[Plan] = []

    def load(self, plan: bytes) -> FakeEngine:
        request, compute = BuildRequest.from_bytes(plan), computing_request(plan)

        def run(context: FakeContext) -> None:
            self.ran.append(len(request.constants))
            self.timer.spent_us = self.constants_us(request) if request.constants else 100.0
            compute(context)
            if request.constants and self.off_by:
                context.tensor("output0", request.outputs[0]).add_(self.off_by)

        self.loaded.append(FakeEngine(self.scratch_bytes(request), compute=run))
        return self.loaded[-1]

    def graph(
        self, function: Callable[..., object], *inputs: torch.Tensor, weights: Sequence[int], kind: str = "inference"
    ) -> HybridGraph:
        module = trace(function, *inputs)
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        static = frozenset(names[position] for position in weights)
        captured = CapturedGraph(module, kind, static, False)  # type: ignore[arg-type]
        session = Session((self.engine, EagerEngine()), self.services)
        return HybridGraph(captured, session, self.config, self.plans.append)

    def settle(self, call: Callable[[], object]) -> None:
        """Call until all engines are built and in use."""
        for _ in range(4):
            assert wait_for_builds(60)
            call()
        assert wait_for_builds(60)

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of the plan that runs now."""
        return self.plans[-1].regions[0].kernels


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor]:
    return ((x @ weight.t() + bias).relu(),)


class Layer:
    """A layer's tensors, its graph, and a check of one call."""

    def __init__(self, bench: Bench, width: int = 16) -> None:
        self.bench = bench
        self.x, self.weight, self.bias = torch.randn(4, width), torch.randn(8, width), torch.randn(8)
        self.graph = bench.graph(layer, self.x, self.weight, self.bias, weights=(1, 2))

    @staticmethod
    def settled(bench: Bench) -> Layer:
        """A graph whose engines were chosen after all builds."""
        made = Layer(bench)
        bench.settle(made.check)
        return made

    def check(self) -> None:
        (found,) = self.graph([self.x, self.weight, self.bias])
        torch.testing.assert_close(found, layer(self.x, self.weight, self.bias)[0])

    def constants(self) -> int:
        """Number of constants of the engine that runs a call now."""
        self.check()
        return self.bench.ran[-1]


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    return lambda *args, **settings: Bench(tmp_path, *args, **settings)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds builds back once the environment names it: see `fake_builder`."""
    folder = tmp_path / "gate"
    folder.mkdir()
    return folder


@contextlib.contextmanager
def busy_builder() -> Iterator[None]:
    """A build thread that is blocked until the end of the test."""
    begun, may_end = threading.Event(), threading.Event()
    build_thread().submit(Job(lambda: (begun.set(), may_end.wait(60), None)[-1]))
    assert begun.wait(60)
    try:
        yield
    finally:
        may_end.set()


def begun(gate: Path) -> int:
    return len(list(gate.glob("*.begun")))


def test_constants_take_over_where_they_are_faster(bench: Callable[..., Bench]) -> None:
    """The engine is built off the call, timed against weights as inputs, and used in a later call; the plan says so. The next process uses
    constants from its first call, and builds nothing."""
    one = bench()
    made = Layer(one)
    made.check()
    one.settle(made.check)
    assert made.constants() == 2  # the folded transpose, and the bias
    assert one.steps == ("TensorRT engine of r0, weights as constants",)
    assert one.plans[-1].regions[0].costs[0].microseconds == 50.0
    assert one.plans[0].regions[0].engine == "eager"  # until the form with inputs was built
    again = bench()
    again.engine._entry = "nowhere:build"
    other = Layer(again)
    other.weight.copy_(made.weight)
    other.bias.copy_(made.bias)
    other.check()
    assert again.steps == one.steps
    assert wait_for_builds(60)
    assert other.constants() == 2


def test_entries_that_are_cut_short_are_built_anew(bench: Callable[..., Bench]) -> None:
    """Kernels of engines with constants are kept too."""
    one = bench()
    made = Layer.settled(one)
    store, whole = one.services.store, dict[str, bytes]()
    for key in store.keys("tensorrt"):
        data = store.get("tensorrt", key)
        assert data is not None
        if b"fake: 1 inputs" in data:
            whole[key] = data
            store.remove("tensorrt", key)
            store.put("tensorrt", key, data[:-5])
    assert len(whole) == 1
    again = bench()
    other = Layer(again)
    other.weight.copy_(made.weight)
    other.bias.copy_(made.bias)
    again.settle(other.check)
    assert other.constants() == 2
    assert {key: store.get("tensorrt", key) for key in whole} == whole


def test_a_build_that_is_under_way_is_waited_for_once(
    bench: Callable[..., Bench], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request meanwhile gets the same build, and is told about it once."""
    monkeypatch.setenv(fake_builder.FOLDER, str(gate))
    one = bench()
    started: list[str] = []

    class Maker:
        def key_and_request(self, weights: Sequence[torch.Tensor]) -> tuple[str, bytes]:
            return f"{float(weights[0]):g}", b""

        def start(self, key: str, request: bytes) -> Build:
            started.append(key)
            return one.engine._builds.start(key, one.engine._entry, request, 60)

    form = ConstantForm("r0", 4, Maker())  # type: ignore[arg-type]
    for value in (1.0, 1.0, 2.0):
        assert form.prepare([torch.tensor(value)]) is None
        build = form.begun()
        assert build is not None
        assert build.key == f"{value:g}"
        assert form.begun() is None
    assert started == ["1", "2"]
    (gate / "go").touch()
    eventually(lambda: build.done)
    assert form.prepare([torch.tensor(2.0)]) is None  # the request is none: its build has failed
    assert form.is_given_up


@pytest.mark.parametrize(("taken_us", "constants"), [(99.0, 0), (98.1, 0), (98.0, 2), (10.0, 2), (150.0, 0)])
def test_inputs_stay_where_constants_gain_two_percent_at_most(
    bench: Callable[..., Bench], taken_us: float, constants: int
) -> None:
    """100 us with inputs. An engine that is not faster is released."""
    one = bench()
    one.constants_us = lambda request: taken_us
    made = Layer(one)
    one.settle(made.check)
    assert made.constants() == constants
    assert ("constants" in one.steps[0]) == bool(constants)
    form = "constants" if constants else "inputs"
    why = f"it takes 100.0 us with its weights as inputs, {taken_us:.1f} us with constants"
    assert one.plans[-1].regions[0].note == f"weights as {form}: {why}"


def test_what_may_not_be_doubled_is_not_even_built(bench: Callable[..., Bench]) -> None:
    """By default, constants may take one twentieth of a graph's weights. A graph of one region has none, and no engine with constants is
    loaded."""
    one = bench(Config().tensorrt_constants_percent)
    made = Layer(one)
    one.settle(made.check)
    assert made.constants() == 0
    assert set(one.ran) == {0}
    assert len(one.loaded) == 1
    why = "they take 544 bytes, and `tensorrt_constants_percent` allows 27"
    assert one.plans[-1].regions[0].note == f"weights as inputs: {why}"


def test_a_change_is_seen_by_the_next_call_and_followed(
    bench: Callable[..., Bench], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call takes weights as inputs. An engine with the new weights takes over when it is built. If the weights change back, the loaded
    engine is used again."""
    one = bench()
    made = Layer.settled(one)
    assert made.constants() == 2
    monkeypatch.setenv(fake_builder.FOLDER, str(gate))
    before = made.weight.clone()
    for change in (lambda: made.weight.add_(1), lambda: made.bias.data.mul_(2), lambda: made.weight.copy_(before)):
        change()
        for _ in range(3):
            assert made.constants() == 0
    (gate / "go").touch()
    assert wait_for_builds(60)
    assert made.constants() == 2
    built = begun(gate)
    with busy_builder():
        made.weight.add_(1)
        assert made.constants() == 0
        made.weight.copy_(before)
        assert made.constants() == 0
    assert wait_for_builds(60)
    assert made.constants() == 2
    assert begun(gate) == built  # nobody looked at what was there for a moment


def test_a_change_that_nobody_counts_needs_refresh_at_most(bench: Callable[..., Bench]) -> None:
    """The same tensor at the same address and version; `refresh` makes the next call read it."""
    one = bench()
    made = Layer.settled(one)
    made.weight.data.numpy()[:] += 1
    refresh([made.weight])
    with busy_builder():
        assert made.constants() == 0
    assert wait_for_builds(60)
    assert made.constants() == 2
    made.weight = torch.randn(8, 16)  # another tensor
    with busy_builder():
        assert made.constants() == 0
    assert wait_for_builds(60)
    assert made.constants() == 2


def test_a_change_while_another_is_built(
    bench: Callable[..., Bench], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current build is stopped, as it is of no use. In the end, the engine of the last values serves."""
    one = bench()
    made = Layer.settled(one)
    monkeypatch.setenv(fake_builder.FOLDER, str(gate))
    made.weight.add_(1)
    assert made.constants() == 0
    eventually(lambda: begun(gate) == 1)
    made.weight.add_(1)
    assert made.constants() == 0
    eventually(lambda: begun(gate) == 2)  # one build at a time: the first has ended
    (gate / "go").touch()
    assert wait_for_builds(60)
    assert made.constants() == 2
    assert begun(gate) == 2


def test_a_change_back_while_another_is_built(
    bench: Callable[..., Bench], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loaded engine is used again, and is not replaced."""
    one = bench()
    made = Layer.settled(one)
    monkeypatch.setenv(fake_builder.FOLDER, str(gate))
    before = made.weight.clone()
    made.weight.add_(1)
    assert made.constants() == 0
    eventually(lambda: begun(gate) == 1)
    made.weight.copy_(before)
    made.check()
    eventually(lambda: made.constants() == 2)
    (gate / "go").touch()
    assert wait_for_builds(60)
    assert made.constants() == 2
    eventually(lambda: not one.engine._builds.process_ids())


def test_weights_that_keep_changing_are_inputs(
    bench: Callable[..., Bench], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine would ever be ready in time: after a few changes no more are built."""
    one = bench()
    made = Layer.settled(one)
    monkeypatch.setenv(fake_builder.FOLDER, str(gate))
    for change in range(MOST_CHANGES + 3):
        made.weight.add_(1)
        assert made.constants() == 0
        eventually(lambda change=change: begun(gate) >= min(change + 1, MOST_CHANGES))
    (gate / "go").touch()
    assert wait_for_builds(60)
    assert made.constants() == 0
    assert begun(gate) == MOST_CHANGES


def test_a_build_that_ends_late_does_not_stop_another_of_the_same_values(
    bench: Callable[..., Bench], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change, change back and change again, while the builder of the first change takes its time to stop."""
    one = bench()
    made = Layer.settled(one)
    values = [made.weight.clone(), made.weight + 1]
    monkeypatch.setenv(fake_builder.FOLDER, str(gate))
    (gate / "stubborn").touch()
    for turn in (1, 0, 1):
        with busy_builder():  # else the engine at hand may serve in this very call where its values are back
            made.weight.copy_(values[turn])
            assert made.constants() == 0
        eventually(lambda: begun(gate) == 1)
        with busy_builder():
            pass  # what was packed has been looked at
    (gate / "stubborn").unlink()
    eventually(lambda: begun(gate) == 2)
    with busy_builder():
        pass  # the first one's end is known
    (gate / "go").touch()
    assert wait_for_builds(60)
    assert made.constants() == 2


def test_weights_that_are_packed_in_every_call_are_inputs(bench: Callable[..., Bench]) -> None:
    """Weights that are packed in every call stay inputs, as weights on a device without version counters: comparing them each time would be
    useless."""
    one = bench()
    made = Layer.settled(one)
    for _ in range(20):
        with busy_builder():
            refresh([made.weight, made.bias])
            assert made.constants() == 0
        assert wait_for_builds(60)
    assert made.constants() == 0


def test_calls_of_two_threads_see_every_change(bench: Callable[..., Bench]) -> None:
    """Each thread compares its own results, while a third thread changes the weights between their calls. Engines are built and swapped
    meanwhile."""
    one = bench()
    made = Layer.settled(one)
    turns, stop = threading.Barrier(3), threading.Event()
    values, seen, wrong = [torch.randn(8, 16), made.weight.clone()], list[int](), list[BaseException]()

    def call() -> None:
        while not stop.is_set():
            turns.wait(60)
            try:
                for _ in range(20):
                    seen.append(made.constants())
            except BaseException as error:
                wrong.append(error)
            turns.wait(60)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(8):
        with torch.no_grad():
            made.weight.copy_(values[turn % 2])
        if turn == 7:
            stop.set()
        turns.wait(60)
        turns.wait(60)
        time.sleep(0.05 * turn)  # now and then what is built is there in time
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong[0]
    assert 0 in seen
    assert wait_for_builds(60)
    assert made.constants() == 2


def test_one_graph_of_two_sets_of_weights(bench: Callable[..., Bench]) -> None:
    """Two instances of a module run with their own weights, whichever weights the engine has."""
    one = bench()
    made = Layer.settled(one)
    first, second = (made.weight, made.bias), (torch.randn(8, 16), torch.randn(8))
    found = []
    with busy_builder():
        for made.weight, made.bias in (second, first, second, first):
            found.append(made.constants())
    assert found == [0, 2, 0, 2]
    assert wait_for_builds(60)
    found = []
    for made.weight, made.bias in (second, first):
        found.append(made.constants())
    assert found == [2, 0]  # one engine is held, that of the weights that were new last


def test_regions_that_gain_least_per_byte_give_their_constants_up(bench: Callable[..., Bench]) -> None:
    """The budget holds constants of two regions out of three. The region that gains least loses its engine."""

    def three(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor]:
        return ((((x @ a).relu().sin() @ b).relu().sin() @ c).relu(),)

    one = bench(70)
    gains = {8: 10.0, 16: 30.0, 4: 8.0}  # us, by the columns of a weight: 512, 512 and 256 bytes
    one.constants_us = lambda request: 100.0 - gains[next(iter(request.constants.values())).shape[1]]
    x, weights = torch.randn(4, 16), [torch.randn(16, 8), torch.randn(8, 16), torch.randn(16, 4)]
    graph = one.graph(three, x, *weights, weights=(1, 2, 3))

    def check() -> None:
        for found, wanted in zip(graph([x, *weights]), three(x, *weights), strict=True):
            torch.testing.assert_close(found, wanted)

    one.settle(check)
    one.ran.clear()
    check()
    # 70% of 1280 bytes are 896. By gain per byte: 512 at 59 ns, 256 at 31, and 512 at 20, for which nothing is left.
    assert one.ran == [0, 1, 1]
    assert [region.engine for region in one.plans[-1].regions if region.kernels] == ["tensorrt"] * 3


def test_a_budget_is_shared_by_gain_per_byte() -> None:
    """The order of requests does not matter, and a dropped form takes nothing."""

    class Form:
        def __init__(self, size_bytes: int) -> None:
            self.size_bytes = size_bytes
            self.is_given_up = False

        def give_up(self, why: str) -> None:
            assert "tensorrt_constants_percent" in why
            self.is_given_up = True

    budget = Budget(100)
    small, large, other = Form(40), Form(80), Form(60)
    assert budget.grant(small, 4.0)  # type: ignore[arg-type]
    assert not budget.grant(large, 4.0)  # type: ignore[arg-type]
    assert large.is_given_up
    assert budget.grant(other, 12.0)  # type: ignore[arg-type]
    assert not small.is_given_up
    better = Form(40)
    assert budget.grant(better, 8.0)  # type: ignore[arg-type]
    assert (small.is_given_up, other.is_given_up) == (True, False)
    del better
    gc.collect()
    assert budget.grant(Form(30), 1.0)  # type: ignore[arg-type]


def test_weights_of_training_graphs_and_of_none_are_no_constants(bench: Callable[..., Bench]) -> None:
    """In training, every step changes the weights."""
    one = bench()
    x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
    graph = one.graph(layer, x, weight, bias, weights=(1, 2), kind="forward")

    def check() -> None:
        (found,) = graph([x, weight, bias])
        torch.testing.assert_close(found, layer(x, weight, bias)[0])

    one.settle(check)
    assert set(one.ran) == {0}
    assert len(one.loaded) == 1
    region = partition_graph(trace(layer, x, weight, bias), [one.engine], Config()).graph.segments[0].region
    assert positions_of(region) == ()
    assert Budget.of([region], 100).limit_bytes == 0


def test_what_cannot_be_built_or_loaded_stays_as_it_is(bench: Callable[..., Bench]) -> None:
    """With inputs the region works as before: no warning, nothing raised."""
    one = bench()
    load = one.load

    def only_inputs(plan: bytes) -> FakeEngine:
        if BuildRequest.from_bytes(plan).constants:
            raise CompileError("no memory for it")
        return load(plan)

    one.load = only_inputs  # type: ignore[method-assign]
    made = Layer(one)
    one.settle(made.check)
    assert made.constants() == 0
    assert one.plans[-1].regions[0].engine == "tensorrt"


def test_constants_that_compute_something_else_are_given_up(bench: Callable[..., Bench]) -> None:
    """The accuracy check tests the engine with constants; the form with inputs stays on TensorRT."""
    one = bench()
    one.off_by = 1.0
    made = Layer(one)
    one.settle(made.check)
    assert 2 in one.ran
    assert made.constants() == 0
    assert one.plans[-1].regions[0].engine == "tensorrt"


def test_a_later_engine_that_needs_more_working_memory_is_not_put_to_work(bench: Callable[..., Bench]) -> None:
    """The plan has laid out working memory of that size."""
    one = bench()
    made = Layer.settled(one)
    one.scratch_bytes = lambda request: 1000
    made.weight.add_(1)
    one.settle(made.check)
    assert made.constants() == 0


def test_what_is_captured_reads_the_weights_of_its_replay(bench: Callable[..., Bench]) -> None:
    """A CUDA graph with constants would replay old weights."""
    one = bench()
    made = Layer.settled(one)
    one.streams.capturing = True
    assert made.constants() == 0
    one.streams.capturing = False
    assert made.constants() == 2


def test_a_dropped_graph_leaves_no_build_and_no_weights(
    bench: Callable[..., Bench], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped graph's builds end, and its weights are freed."""
    one = bench()
    made = Layer.settled(one)
    monkeypatch.setenv(fake_builder.FOLDER, str(gate))
    made.weight.add_(1)
    made.check()
    eventually(lambda: begun(gate) == 1)
    del made.graph
    one.plans.clear()
    gc.collect()
    assert wait_for_builds(60)
    eventually(lambda: not one.engine._builds.process_ids())


def test_marks_are_on_the_host_whatever_the_default_device() -> None:
    """A call reads the mark on the host; from a GPU, it would wait for the device."""
    form = ConstantForm("r0", 8, _NoMaker())
    with torch.device("meta"):
        mark = form.pack()
    assert mark.device.type == "cpu"
    assert wait_for_builds(60)


class _NoMaker:
    """A maker that makes nothing."""

    def key_and_request(self, weights: Sequence[torch.Tensor]) -> tuple[str, bytes]:
        raise CompileError("nothing is wanted")

    def start(self, key: str, request: bytes) -> Build:
        raise AssertionError

    def load(self, key: str, built: bytes) -> Any:
        raise AssertionError
