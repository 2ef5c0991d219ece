"""Engines of TensorRT on a GPU give eager's results, in all ways of calling them. These tests have not run yet, as there was no GPU.

Tests assert that TensorRT runs the regions, which the estimate chose: so no test depends on a time.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.builds.background import wait_for_builds
from torch_hybrid_backend.builds.builds import Builds
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.tensorrt.installed import installation
from torch_hybrid_backend.engines.tensorrt.ranges import MAX_GROWTH
from torch_hybrid_backend.errors import HybridError

_INSTALLED = installation()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(isinstance(_INSTALLED, Refused), reason=getattr(_INSTALLED, "why", "")),
]

_DEVICE = "cuda"
_BUILD_S = 600.0
_WIDTH = 128
# The root mean square of the errors over that of the result; eager's own, if larger, times three.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Block(nn.Module):
    """A layer of a transformer: rows of `_WIDTH` numbers, any number of samples and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, rows, _ = x.shape
        q, k, v = (y.view(samples, rows, 4, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).split(_WIDTH, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, rows, _WIDTH))
        return x + self.down(functional.gelu(self.up(x)))


class Images(nn.Module):
    """Convolutions with normalisation, activation and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = functional.max_pool2d(x + self.norm(self.second(x)).relu(), 2)
        return self.head(x.mean((2, 3))).softmax(-1)


class Subject:
    """A model in eager, in float64, and compiled for TensorRT only, with its own cache. Errors of TensorRT are raised."""

    def __init__(self, model: nn.Module, folder: Path, *, dynamic: bool = False, **settings: Any) -> None:
        self.model = model.eval().to(_DEVICE)
        self.plans: list[Plan] = []
        chosen: dict[str, Any] = {"placement": "estimate", "strict": True, "cache_dir": folder, **settings}
        config = Config(engines=("tensorrt", "eager"), compile_deadline_s=_BUILD_S, **chosen)
        backend = functools.partial(compile_graph, config=config, on_plan=self.plans.append)
        torch._dynamo.reset()
        self.compiled: Callable[..., Any] = torch.compile(self.model, backend=backend, dynamic=dynamic)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = self.compiled(x)
        return result

    def settle(self, x: torch.Tensor) -> None:
        """Call until all engines are built and in use."""
        for _ in range(4):
            self(x)
            assert wait_for_builds(_BUILD_S)

    @property
    def engines(self) -> set[str]:
        """Engines of the newest plan."""
        return {region.engine for region in self.plans[-1].regions}

    def check(self, x: torch.Tensor, result: torch.Tensor | None = None) -> None:
        """Check that a call's result, or `result`, is as near to float64 as eager's, or as the dtype allows."""
        got = self(x) if result is None else result
        with torch.no_grad():
            eager, exact = self.model(x), copy.deepcopy(self.model).double()(x.double())
        assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
        size = exact.square().mean().sqrt()
        error, own = (((each.double() - exact).square().mean().sqrt() / size).item() for each in (got, eager))
        assert error <= max(_TOLERANCES[got.dtype], 3 * own)


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(_DEVICE, dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a cache, whose sessions end with the test."""
    made = tmp_path / "cache"
    made.mkdir(mode=0o700)
    torch.manual_seed(0)
    yield made
    session._sessions.clear()


@pytest.mark.parametrize("dtype", _TOLERANCES)
@pytest.mark.parametrize(("make", "shape"), [(Block, (2, 33, _WIDTH)), (Images, (2, 3, 32, 32))])
def test_results(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> None:
    """Eager computes results until the engine is built, then TensorRT does; inputs at other addresses too."""
    subject = Subject(make().to(dtype), folder)
    subject.check(_randn(*shape, dtype=dtype))
    subject.settle(_randn(*shape, dtype=dtype))
    assert subject.engines == {"tensorrt"}
    for seed in range(3):
        subject.check(_randn(*shape, seed=seed, dtype=dtype))


def test_sizes_known_at_run_time(folder: Path) -> None:
    """The engine serves a range of sizes; PyTorch's operators serve the others."""
    subject = Subject(Block(), folder, dynamic=True)
    subject.settle(_randn(2, 30, _WIDTH))
    for rows in (30, 31, 2, 64, 32 * MAX_GROWTH, 32 * MAX_GROWTH + 5, 30):
        subject.check(_randn(3, rows, _WIDTH, seed=rows))
    assert "tensorrt" in subject.engines  # what makes a mask of a size known only at run time may be eager's


@pytest.mark.parametrize("placement", ["estimate", "measure"])
def test_weights_that_change_between_calls(placement: str, folder: Path) -> None:
    """The next call has the new weights, which are inputs of the engine or, if measured to be faster, its constants."""
    subject = Subject(Block(), folder, placement=placement, tensorrt_constants_percent=100)
    x = _randn(2, 33, _WIDTH)
    subject.settle(x)
    for change in range(4):
        with torch.no_grad():
            subject.model.down.weight.mul_(-1.5)
            subject.model.qkv.bias.add_(0.25 * change)
        subject.check(x)
        if change == 1:
            subject.settle(x)  # an engine with the new constants may take over
        subject.check(x)


def test_threads_with_streams_of_their_own(folder: Path) -> None:
    """Threads run one engine at once, each with its own context, and share no working memory."""
    subject = Subject(Block(), folder)
    inputs = [_randn(4, 64, _WIDTH, seed=seed) for seed in range(2)]
    subject.settle(inputs[0])
    results: list[list[torch.Tensor]] = [[], []]
    failures: list[BaseException] = []
    both = threading.Barrier(2)

    def work(number: int) -> None:
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                both.wait(60)
                results[number] += [subject(inputs[number]) for _ in range(50)]
            stream.synchronize()
        except BaseException as error:  # of a thread nobody else would see it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    for x, got in zip(inputs, results, strict=True):
        assert len(got) == 50
        for result in got:
            subject.check(x, result)


def test_a_call_is_captured_into_a_cuda_graph_or_refused(folder: Path) -> None:
    """A replay reads the current inputs and weights. TensorRT-RTX refuses if it may still have to compile; later calls work."""
    subject = Subject(Block(), folder)
    x = _randn(2, 33, _WIDTH)
    subject.settle(x)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            subject(x)  # its context on this stream is made, and kernels are compiled
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=side):
            captured = subject(x)
    except HybridError as error:
        assert "cannot be captured into a CUDA graph" in str(error)  # noqa: PT017  either way is right
    else:
        for seed in (1, 2):
            with torch.no_grad():
                x.copy_(_randn(2, 33, _WIDTH, seed=seed))
                subject.model.out.weight.mul_(-1.25)
            graph.replay()
            torch.cuda.synchronize()
            subject.check(x, captured)
    torch.cuda.synchronize()
    subject.check(_randn(2, 33, _WIDTH, seed=9))


def test_the_default_stream_is_kept_in_order(folder: Path) -> None:
    """Work enqueued before a call is done before the call, and later work after it. The host never waits."""
    subject = Subject(Block(), folder)
    x = _randn(2, 33, _WIDTH)
    subject.settle(x)
    large, results, inputs = _randn(4096, 4096), [], [_randn(2, 33, _WIDTH, seed=seed) for seed in range(10)]
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in inputs:
            for _ in range(4):
                large = large @ large * 1e-4  # milliseconds, so that what does not wait comes too early
            x.copy_(each)
            results.append(subject(x) + 0)
            x.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each, result in zip(inputs, results, strict=True):
        subject.check(each, result)


def test_peak_memory_is_below_a_tenth_more_than_eagers(folder: Path) -> None:
    """The peak of PyTorch's allocator, which holds weights and working memory too, while engines are chosen and in later calls."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
    subject = Subject(nn.Sequential(*layers), folder, placement="measure")
    x = _randn(512, 4096)

    def peak(call: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    with torch.no_grad():
        subject.model(x)  # what libraries allocate once is no call's
        eager = peak(lambda: subject.model(x))
    assert peak(lambda: subject.settle(x)) < 1.1 * eager
    assert peak(lambda: subject(x)) < 1.1 * eager


def test_a_warm_start_builds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session finds the engine in the cache, and runs it in its first call."""
    first, x = Subject(Block(), folder), _randn(2, 33, _WIDTH)
    first.settle(x)
    assert first.engines == {"tensorrt"}
    session._sessions.clear()
    begun: list[str] = []
    start = Builds.start

    def watched(self: Builds, key: str, *request: Any, **options: Any) -> Any:
        build = start(self, key, *request, **options)
        begun.extend([] if build.done else [key])
        return build

    monkeypatch.setattr(Builds, "start", watched)
    again = Subject(copy.deepcopy(first.model), folder)
    again.check(x)
    assert again.engines == {"tensorrt"}
    assert not begun
