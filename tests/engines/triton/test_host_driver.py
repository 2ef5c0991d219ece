"""The launch path without a GPU: the steps of real plans, with their addresses, numbers and grids, through a driver that interprets; and what a
driver may refuse."""

from __future__ import annotations

import copy
import ctypes
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiling import by_estimate, fresh_dynamo
from tests.engines.triton.regions_for_tests import program_of
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.program import NULL, DeviceLaunch, Program, ScalarArgument
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.triton import artifact
from torch_hybrid_backend.engines.triton.host_driver import (
    DriverError,
    HostDriver,
    HostLaunch,
    Node,
    Status,
    find_address,
)
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
from torch_hybrid_backend.errors import DeviceError, HybridError
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

__all__ = ["by_estimate", "fresh_dynamo"]

pytest.importorskip("triton")

_TEXT = """
import triton
import triton.language as tl


@triton.jit
def scaled(x, out, rows, wide, half, exact, kept, ROW: tl.constexpr):
    row = tl.program_id(0) + tl.program_id(1) * 2
    i = row * ROW + tl.arange(0, ROW)
    value = tl.load(x + i, mask=row < rows, other=0)
    tl.store(kept + i, value + (wide >> 40).to(tl.float32), mask=row < rows)
    tl.store(out + i, tl.load(kept + i, mask=row < rows, other=0) * half + exact.to(tl.float32), mask=row < rows)
"""
_SIGNATURE = {
    "x": "*fp32",
    "out": "*fp32",
    "rows": "i32",
    "wide": "i64",
    "half": "fp32",
    "exact": "fp64",
    "kept": "*fp32",
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="hybrid"` has the Triton engine, interpreted, in place of TVM."""
    monkeypatch.setattr(session, "_sessions", {})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HYBRID_ENGINES", "triton")
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")


def test_every_kind_of_parameter(tmp_path: Path) -> None:
    """Addresses of inputs and outputs, numbers of every type, scratch memory in the arena, a null pointer, and a grid of two axes."""
    path = tmp_path / "scaled.kernel"
    artifact.write(path, artifact.Header(_TEXT, "scaled", _SIGNATURE, {"ROW": 8}, 128, 1 << 17))
    numbers = (("int32", 5), ("int64", 3 << 40), ("float32", 0.5), ("float64", 0.25))
    launch = HostLaunch(
        str(path),
        "scaled",
        (0, 1),
        1,
        (2, 3, 1),
        128,
        tuple(ScalarArgument(dtype, value) for dtype, value in numbers),
        1 << 17,
        (2, NULL),
    )
    rows = TensorSpec((40,), "float32", (1,), CPU)
    run = ProgramRunner(Program((rows, rows, rows), (0,), (1,), (), (launch,)))
    for seed in range(2):
        x = torch.randn(40, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(run([x])[0], (x + 3) * 0.5 + 0.25)


def test_scratch_memory_is_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To each program of a product that TMA feeds, for two descriptors: it is the launch's own. What is written there, as a GPU would write it,
    is no input, no result, and nothing that another kernel of the plan still needs."""
    programs, lent = 7, list[int]()
    launched = HostDriver.launch

    def launch(self: HostDriver, number: int, grid: Any, parameters: Any) -> None:
        if grid != (programs, 1, 1):
            return launched(self, number, grid, parameters)
        scratch = ctypes.c_void_p.from_address(parameters(len(product.arguments))).value
        assert scratch is not None
        lent.append(scratch)
        ctypes.memset(scratch, 0xFF, programs * 256)
        launched(self, number, grid, parameters)
        ctypes.memset(scratch, 0xFF, programs * 256)
        return None

    monkeypatch.setattr(HostDriver, "launch", launch)
    inputs = torch.randn(40, 72), torch.randn(56, 72), torch.randn(40, 56)
    function = lambda x, w, o: torch.softmax(torch.nn.functional.linear(x.exp(), w) + o, -1)  # noqa: E731
    program, taken = program_of(tmp_path, function, *inputs, tiling=Tiling(16, 32, 16, persistent=programs))
    (product,) = (step for step in program.steps if isinstance(step, DeviceLaunch) and step.grid == (programs, 1, 1))
    scratch, profile = product.scratch
    assert (program.buffers[scratch].span, program.buffers[scratch].dtype, profile) == (programs * 256, "uint8", NULL)
    run = ProgramRunner(program)
    for _ in range(2):
        (got,) = run(taken)
        torch.testing.assert_close(got.double(), function(*(x.double() for x in inputs)), rtol=1e-4, atol=1e-5)
    assert len(lent) == 2
    assert len({*lent}) == 1, "addresses of a frame stay as they are: a CUDA graph has them"


@pytest.mark.usefixtures("interpreted")
def test_a_model_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its regions are launches on the host's memory, by this driver; forward and backward equal eager."""
    grids: list[tuple[int, int, int]] = []
    launched = HostDriver.launch

    def recorded(self: HostDriver, number: int, grid: Any, parameters: Any) -> None:
        grids.append(grid)
        launched(self, number, grid, parameters)

    monkeypatch.setattr(HostDriver, "launch", recorded)
    monkeypatch.setenv("HYBRID_STRICT", "1")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.GELU(), torch.nn.LayerNorm(33), torch.nn.Softmax(-1))
    exact = copy.deepcopy(model).double()
    x = torch.randn(6, 20)
    out = torch.compile(model, backend="hybrid")(x)
    out.square().sum().backward()
    expected = exact(x.double())
    expected.square().sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    for own, other in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-4, atol=1e-6)
    assert len(grids) > 4


def _failing(status: Status, after: int = 0) -> Callable[..., int]:
    """A function of the driver's that fails from its `after`-th call on."""
    left = iter(range(after))

    def fail(*_: object) -> int:
        if next(left, None) is None:
            raise DriverError(status)
        return 0

    return fail


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


def _warnings_of_two_calls(
    compiled: Callable[[torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> list[str]:
    """The warnings of two calls in which a compiled `_softmax` gives eager's results."""
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            x = torch.randn(5, 7)
            torch.testing.assert_close(compiled(x), _softmax(x))
    return [record.message for record in caplog.records]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("function", "status"),
    [
        ("load", Status.INVALID_IMAGE),
        ("load", Status.OUT_OF_MEMORY),
        ("kernel", Status.NOT_FOUND),
        ("launch", Status.OUT_OF_MEMORY),
        ("launch", Status.NOT_SUPPORTED),
    ],
)
def test_a_kernel_that_fails_costs_its_region(
    function: str, status: Status, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that cannot be loaded or launched in the first call: one warning; eager gives the results of that call and the next."""
    monkeypatch.setattr(HostDriver, function, _failing(status))
    (warning,) = _warnings_of_two_calls(torch.compile(_softmax, backend="hybrid"), caplog)
    assert f"CUDA_ERROR_{status.name} ({status:d})" in warning
    assert "falls back to eager" in warning


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_that_fails_later_costs_its_region(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a later call, which gives eager's results."""
    compiled = torch.compile(_softmax, backend="hybrid")
    compiled(torch.randn(5, 7))
    monkeypatch.setattr(HostDriver, "launch", _failing(Status.NOT_SUPPORTED))
    (warning,) = _warnings_of_two_calls(compiled, caplog)
    assert "NOT_SUPPORTED" in warning


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_without_memory_costs_its_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager gives the results of every call that finds no memory; kernels run again when there is some."""
    compiled = torch.compile(_softmax, backend="hybrid")
    x = torch.randn(5, 7)
    compiled(x)
    whole = HostDriver.launch
    monkeypatch.setattr(HostDriver, "launch", _failing(Status.OUT_OF_MEMORY))
    warnings = _warnings_of_two_calls(compiled, caplog)
    assert len(warnings) == 2
    assert all("eager runs this call" in warning and "OUT_OF_MEMORY" in warning for warning in warnings)
    launched = []

    def counted(self: HostDriver, *arguments: Any) -> None:
        launched.append(arguments)
        whole(self, *arguments)

    monkeypatch.setattr(HostDriver, "launch", counted)
    torch.testing.assert_close(compiled(x), _softmax(x))
    assert launched


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("placement", "calls_before"), [("estimate", 0), ("estimate", 1), ("measure", 0)])
def test_an_illegal_address_is_raised(
    placement: str, calls_before: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the kernel's name, in the first call and in later ones: the device is lost, and nothing falls back in silence."""
    monkeypatch.setenv("HYBRID_PLACEMENT", placement)
    compiled = torch.compile(_softmax, backend="hybrid")
    x = torch.randn(5, 7)
    for _ in range(calls_before):
        compiled(x)
    monkeypatch.setattr(HostDriver, "launch", _failing(Status.ILLEGAL_ADDRESS))
    with pytest.raises(
        DeviceError, match=r"the kernel \w+: .*CUDA_ERROR_ILLEGAL_ADDRESS \(700\)\. The GPU cannot be used"
    ):
        compiled(x)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("interpreted")
def test_threads_launch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in one plan, each with its own memory: every call has its own results."""
    monkeypatch.setenv("HYBRID_STRICT", "1")
    compiled = torch.compile(lambda x: (torch.softmax(x, -1) + 1).sum(0), backend="hybrid")
    given = [
        [torch.randn(9, 11, generator=torch.Generator().manual_seed(10 * t + i)) for i in range(8)] for t in range(2)
    ]
    compiled(given[0][0])
    got: list[list[torch.Tensor]] = [[], []]
    start = threading.Barrier(2)

    def work(number: int) -> None:
        start.wait()
        got[number].extend(compiled(x) for x in given[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, inputs in zip(got, given, strict=True):
        for result, x in zip(results, inputs, strict=True):
            torch.testing.assert_close(result, (torch.softmax(x, -1) + 1).sum(0))


def test_kernels_of_a_graph(tmp_path: Path) -> None:
    """A kernel runs when those that it waits for have run, and else in any order, on the parameters it was given when it was added or
    changed."""
    path = tmp_path / "scaled.kernel"
    artifact.write(path, artifact.Header(_TEXT, "scaled", _SIGNATURE, {"ROW": 8}, 128))
    driver = HostDriver()
    kernel = driver.kernel(driver.load(path.read_bytes()), "scaled")
    values = [torch.full((8,), float(i)) for i in range(4)]
    numbers = (ctypes.c_int32(1), ctypes.c_int64(0), ctypes.c_float(2.0), ctypes.c_double(1.0))
    scratch = torch.empty(8)

    def node(read: int, written: int, after: tuple[int, ...] = ()) -> Node:
        """out = 2 x + 1."""
        pointers = [ctypes.c_void_p(values[i].data_ptr()) for i in (read, written)]
        parameters = (*pointers, *numbers, ctypes.c_void_p(scratch.data_ptr()))
        return Node(kernel, (1, 1, 1), driver.given(kernel, lambda i: ctypes.addressof(parameters[i])), after)

    graph = driver.graph()
    first = driver.add(graph, node(0, 1))
    driver.add(graph, node(1, 2, (first,)))
    driver.add(graph, node(1, 3))
    executable = driver.graph(graph)
    driver.launch_graph(executable)
    assert [int(value[0]) for value in values] == [0, 1, 3, 3], "the last may run before the first"
    driver.change(executable, first, node(3, 1))
    driver.launch_graph(executable)
    assert [int(value[0]) for value in values] == [0, 7, 15, 3]
    driver.destroy(graph)
    driver.destroy(executable)
    assert driver.graphs == 0


def test_what_is_no_kernel_is_refused(tmp_path: Path) -> None:
    """Before anything runs, when the plan is made: what is no image, and a name that the module does not have."""
    spec = TensorSpec((8,), "float32", (1,), CPU)

    def run(launch: DeviceLaunch) -> None:
        ProgramRunner(Program((spec, spec), (0,), (1,), (), (launch,)))([torch.ones(8)])

    path = tmp_path / "other.kernel"
    path.write_bytes(b"something else")
    with pytest.raises(HybridError, match=r"loading the module of scaled failed: CUDA_ERROR_INVALID_IMAGE \(200\)"):
        run(HostLaunch(str(path), "scaled", (0, 1), 1, (1, 1, 1), 32))
    path = tmp_path / "scaled.kernel"
    artifact.write(path, artifact.Header(_TEXT, "scaled", _SIGNATURE, {"ROW": 8}, 128))
    with pytest.raises(HybridError, match=r"finding the kernel sealed failed: CUDA_ERROR_NOT_FOUND \(500\)"):
        run(HostLaunch(str(path), "sealed", (0, 1), 1, (1, 1, 1), 32))
    with pytest.raises(HybridError, match="a launch on the CPU needs a driver of its own"):
        run(DeviceLaunch(str(path), "scaled", (0, 1), 1, (1, 1, 1), 32))


def test_functions_that_it_does_not_have_say_so() -> None:
    """Whoever asks for another function of NVIDIA's driver gets one, which returns CUDA_ERROR_NOT_SUPPORTED."""
    find = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(find_address())
    address = find(b"cuMemAlloc_v2")
    assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == Status.NOT_SUPPORTED
