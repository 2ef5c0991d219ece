"""The engine: builds in processes, keys, the cache, ranges, and the step that runs an engine."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.tensorrt.contexts_for_tests import (
    FakeEngine,
    FakeStream,
    FakeStreams,
    computing,
    computing_request,
)
from tests.engines.tensorrt.regions_for_tests import engine, region
from tests.services_for_tests import services
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, PendingRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.tensorrt import engine as module
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest
from torch_hybrid_backend.engines.tensorrt.engine import (
    RegionWithConstants,
    TensorRTEngine,
    TensorRTRegion,
    allows_tf32,
    engine_key,
)
from torch_hybrid_backend.engines.tensorrt.ranges import ranges_of
from torch_hybrid_backend.errors import CompileError, DeadlineError
from torch_hybrid_backend.measuring.measure import HostTimer

pytestmark = pytest.mark.tensorrt

F = torch.nn.functional


def streams(device: object) -> FakeStreams:
    return FakeStreams(FakeStream(7))


def loading(*regions: Region, log: list[bytes] | None = None) -> Callable[..., FakeEngine]:
    """A loader that returns a fake engine for each region, and keeps the bytes."""
    left = list(regions)

    def load(plan: bytes, device: object) -> FakeEngine:
        if log is not None:
            log.append(plan)
        return FakeEngine(1000, compute=computing(left.pop(0)))

    return load


def compiled_by(made: TensorRTEngine, *regions: Region, limit_s: float = 120.0) -> list[CompiledRegion | Exception]:
    """The engine's results for the regions after all builds."""
    results: list[CompiledRegion | Exception] = []
    for each in made.compile(regions, Deadline(limit_s)):
        if isinstance(each, PendingRegion):
            done = threading.Event()
            each.when_done(done.set)
            assert done.wait(120.0)
            try:
                results.append(each.result())
            except CompileError as error:
                results.append(error)
        else:
            results.append(each)
    return results


def key(made: Region, machine: str = "a GPU", **options: Any) -> str:
    return engine_key(made, BuildRequest.of(made, ranges_of(made), **options), machine)


def test_a_region_is_built_in_a_process_and_run_by_a_step(tmp_path: Path) -> None:
    """The result is eager's, in memory laid out by the plan. The layers are readable, and the engine is kept."""
    x, w = torch.randn(2, 3, 8), torch.randn(5, 8)
    made = region(lambda x, w: (F.linear(x, w).relu().transpose(1, 2), x.transpose(0, 1) * 2), x, w)
    plans: list[bytes] = []
    (compiled,) = compiled_by(engine(tmp_path, load=loading(made, log=plans), streams=streams), made)
    assert not isinstance(compiled, Exception), compiled
    assert compiled.program is not None
    assert len(compiled.program.steps) == 1
    assert compiled.program.buffers[-1].shape == (1000 + 256,)
    for _ in range(2):
        inputs = [{"x_1": x, "w_1": w}[each.name] for each in made.inputs]
        results = compiled(inputs)
        expected = made.graph_module(*inputs)
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted)
            assert result.stride() == wanted.stride()
    assert "gemm: " in compiled.texts()[0].text
    # A second process finds it: nothing is built, as nothing can be.
    again = engine(tmp_path, load=loading(made, log=plans), streams=streams, entry="nowhere:build")
    (compiled,) = again.compile([made], Deadline(120.0))
    assert isinstance(compiled, CompiledRegion), compiled
    assert plans[0] == plans[1]


def test_entries_that_are_cut_short_or_foreign_are_built_anew(tmp_path: Path) -> None:
    """Whatever the store has under the key, the loaded engine is complete."""
    made = region(lambda x: x.relu() + 1, torch.ones(4, 4))
    plans: list[bytes] = []

    def compile_once() -> object:
        given = services(tmp_path)
        return compiled_by(engine(given, load=loading(made, log=plans), streams=streams), made)[0]

    assert not isinstance(compile_once(), Exception)
    store = services(tmp_path).store
    name = key(made, "a GPU and its driver")
    whole = store.get("tensorrt", name)
    assert whole is not None
    for wrong in (whole[: len(whole) // 2], b"something else"):
        store.remove("tensorrt", name)
        store.put("tensorrt", name, wrong)
        assert not isinstance(compile_once(), Exception)
        assert store.get("tensorrt", name) is not None
        assert plans[-1] in (store.get("tensorrt", name) or b"")
    (entry,) = (tmp_path / "tensorrt" / name).iterdir()
    entry.write_bytes(whole[:100])  # what the store itself notices
    assert not isinstance(compile_once(), Exception)
    assert len(plans) == 4


def test_an_engine_that_does_not_load_is_refused_and_built_once_more(tmp_path: Path) -> None:
    """An engine of another TensorRT, for instance: the region's error has TensorRT's message."""
    tried: list[bytes] = []

    def load(plan: bytes, device: object) -> FakeEngine:
        tried.append(plan)
        raise CompileError("TensorRT does not load the engine: version mismatch")

    made = region(lambda x: x.relu(), torch.ones(4, 4))
    for _ in range(2):  # the second time it is kept, does not load, and is built anew
        (error,) = compiled_by(engine(tmp_path, load=load, streams=streams), made)
        assert isinstance(error, CompileError)
        assert "version mismatch" in str(error)
    assert len(tried) == 3


def test_builds_end_with_the_deadline(tmp_path: Path) -> None:
    """Builds that are not done by the deadline are given up. Each region has an error of its own."""
    regions = [region(lambda x: x.relu(), torch.ones(4, 4)), region(lambda x: x.exp(), torch.ones(4, 4))]
    errors = compiled_by(engine(tmp_path, load=loading(*regions), streams=streams), *regions, limit_s=0.2)
    assert all(isinstance(error, DeadlineError) for error in errors), errors


def test_keys_hold_arguments_wires_and_everything_around() -> None:
    """torch_tensorrt's own cache would confuse some of these."""
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    functions: list[Callable[..., Any]] = [
        lambda x, y: x - y * 2,
        lambda x, y: x - y * 3,
        lambda x, y: (x - y) * x,
        lambda x, y: (x - y) * y,
        lambda x, y: x.sum(0) - y.sum(0),
        lambda x, y: x.sum(1) - y.sum(1),
        lambda x, y: F.gelu(x) - y,
        lambda x, y: F.gelu(x, approximate="tanh") - y,
    ]
    keys = {key(region(function, x, y)) for function in functions}
    assert len(keys) == len(functions)
    first = region(functions[0], x, y)
    keys |= {
        key(region(functions[0], x.half(), y.half())),
        key(region(functions[0], x.t(), y)),
        key(first, "another GPU"),
    }
    keys |= {key(first, tf32=True), key(first, constants={1: y}), key(first, constants={1: y * 2})}
    keys.add(key(region(functions[0], x, y, dynamic=True)))
    assert len(keys) == len(functions) + 7
    assert key(first) == key(region(functions[0], torch.zeros(4, 4), y))  # names and values of inputs are no part of it


def test_regions_that_differ_in_one_argument_or_wire_have_different_engines() -> None:
    """The built engines differ, not only their keys."""
    from tests.engines.tensorrt.regions_for_tests import built

    x, y = torch.ones(4, 4), torch.ones(4, 4)
    plans = {
        built(region(function, x, y)).plan
        for function in (
            lambda x, y: x - y * 2,
            lambda x, y: x - y * 3,
            lambda x, y: (x - y) * x,
            lambda x, y: (x - y) * y,
        )
    }
    assert len(plans) == 4


def test_weights_as_constants_are_another_engine(tmp_path: Path) -> None:
    """The first `refine` has TensorRT build the engine, the next finds it: one input, fewer layers, and the weights in its bytes. Other weights
    make another engine; a second process finds the first one."""
    x, w, b = (
        torch.randn(2, 512, 4, 4),
        torch.randn(64, 512, 3, 3),
        torch.randn(64),
    )  # the weight is larger than any kernel's code
    # As parameters of inference graphs are marked.
    traced = region(lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(), x, w, b)
    made = dataclasses.replace(
        traced, inputs=tuple(dataclasses.replace(each, is_constant=each.name != "x_1") for each in traced.inputs)
    )
    by_name = {"x_1": x, "w_1": w, "b_1": b}
    inputs = [by_name[each.name] for each in made.inputs]
    constants = {i: tensor for i, tensor in enumerate(inputs) if tensor is not x}
    plans: list[bytes] = []

    def load(plan: bytes, device: object) -> FakeEngine:
        plans.append(plan)
        given = constants if len(plan) > w.nbytes else {}
        return FakeEngine(compute=computing_request(BuildRequest.of(made, {}, constants=given).to_bytes()))

    class Timer(HostTimer):
        def round(self, calls: Any) -> list[int]:
            for call in calls:
                call()
            return [200, 100][: len(calls)]  # with inputs, with constants

    config = Config(tensorrt_constants_percent=100)
    given = dataclasses.replace(services(tmp_path), timer=lambda device: Timer())
    (compiled,) = compiled_by(engine(given, load=load, streams=streams, config=config), made)
    assert isinstance(compiled, TensorRTRegion), compiled
    assert compiled.refine(inputs, 0.01, Deadline(120.0)) is compiled
    build = compiled.begun()
    assert build is not None
    assert compiled.begun() is None  # told once
    done = threading.Event()
    build.when_done(done.set)
    assert done.wait(120.0)
    refined = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert isinstance(refined, RegionWithConstants)
    assert (compiled.form, refined.form) == ("", "constants")
    torch.testing.assert_close(refined(inputs)[0], made.graph_module(*inputs)[0])
    assert len(plans[0]) < w.nbytes < len(plans[1]), [len(plan) for plan in plans]
    before, after = (each.texts()[0].text.splitlines() for each in (compiled, refined))
    assert len(after) <= len(before)
    assert after != before
    keys = {key(made), key(made, constants=constants), key(made, constants={**constants, 1: constants[1] + 1})}
    assert len(keys) == 3
    given = dataclasses.replace(services(tmp_path), timer=lambda device: Timer())
    (again,) = engine(given, load=load, streams=streams, config=config, entry="nowhere:build").compile(
        [made], Deadline(120.0)
    )
    assert isinstance(again, TensorRTRegion), again
    assert isinstance(again.refine(inputs, 0.01, Deadline(120.0)), RegionWithConstants)
    assert again.begun() is None


def test_tf32_only_where_every_operator_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has one flag for products and convolutions; PyTorch has one for each."""
    x, w = torch.ones(1, 4, 8, 8), torch.ones(4, 4, 3, 3)
    product = region(lambda x: x @ x, torch.ones(4, 4))
    convolution = region(lambda x, w: F.conv2d(x, w), x, w)  # noqa: PLW0108 (tracing counts its arguments)
    both = region(lambda x, w: F.conv2d(x, w).flatten(2) @ torch.ones(36, 2), x, w)
    neither = region(lambda x: x.relu(), x)
    for precisions, allowed in (
        (("tf32", "tf32"), (True, True, True)),
        (("ieee", "tf32"), (False, True, False)),
        (("tf32", "none"), (True, False, False)),
        (("ieee", "ieee"), (False, False, False)),
    ):
        monkeypatch.setattr(module, "float32_precision", lambda device, found=precisions: found)
        assert tuple(map(allows_tf32, (product, convolution, both))) == allowed
        assert not allows_tf32(neither)


def test_regions_it_cannot_serve_are_refused_before_anything_is_built() -> None:
    """Numbers that are tensors on the host, and sizes that are no dimension of an input, are refused."""
    made = region(lambda x: x.relu(), torch.ones(3))
    assert engine().accepts(made)
    on_gpu = dataclasses.replace(made, device=Device("cuda", 0))
    refused = engine().accepts(on_gpu)
    assert not refused
    assert refused.code is Reason.DEVICE


def test_the_session_has_it_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is disabled by default, and says so without a GPU. Users who did not enable it are not warned."""
    made = dict(session.ENGINES)["tensorrt"](Config(), services())
    assert not made.available()
    named = dict(session.ENGINES)["tensorrt"](dataclasses.replace(Config(), engines=("tensorrt",)), services())
    verdict = named.available()
    assert verdict or verdict.code is Reason.NO_DEVICE
    assert made.describe()[-1][0] == "GPU"
