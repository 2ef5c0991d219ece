"""Later calls in float16 and bfloat16 give eager's values, as the first one does: values are rounded where eager rounds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, or an error: nothing falls back to eager."""
    monkeypatch.setenv("HYBRID_STRICT", "1")


def whole_numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers: float32 holds sums of their products exactly, in whatever order they are added."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def check(functions: Mapping[str, Function], x: Tensor, differing: float = 0.0) -> None:
    """Every function's values in a later call are eager's; a share may be `differing` in the last place, of functions that are approximated."""
    compiled = torch.compile(lambda x: [fn(x) for fn in functions.values()], backend="hybrid")
    with torch.no_grad():
        wants = [fn(x) for fn in functions.values()]
        results = [compiled(x) for _ in range(3)][-1]
    for name, got, want in zip(functions, results, wants, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True, msg=name)
        same = (got == want) | (got.isnan() & want.isnan())
        assert 1 - same.double().mean().item() <= differing, name


SUMS: dict[str, Function] = {
    "product": lambda x: (x @ x.T) * 0.1,
    "product, bias": lambda x: F.linear(x, x[:24], x[0, :24]) * 0.1 - 3,
    "batched product": lambda x: torch.bmm(x[None], x.T[None]) * 0.3,
    "matrix and vector": lambda x: torch.mv(x, x[0]) * 0.3 + 0.1,
    "sum": lambda x: x.sum(-1) * 1.7,
    "sum of columns": lambda x: x.sum(0) * 1.7,
    "mean": lambda x: x.mean(-1) * 1.7 + 0.1,
    "row over its sum": lambda x: x / (x.abs().sum(-1, keepdim=True) * 37),
    "running sum": lambda x: x.cumsum(-1) * 1.7,
}


@HALF
def test_a_sum_behind_which_something_follows(dtype: torch.dtype) -> None:
    """A product or a sum is rounded before the next operator reads it, in the same kernel or not."""
    check(SUMS, whole_numbers(dtype, 48, 64))


@HALF
@pytest.mark.parametrize("groups", [1, 16])
def test_a_convolution_behind_which_something_follows(groups: int, dtype: torch.dtype) -> None:
    """A convolution's sums are rounded before an activation, a scale or a pooling reads them."""
    x, w = whole_numbers(dtype, 1, 16, 14, 14), whole_numbers(dtype, 16, 16 // groups, 3, 3)
    check({"activation": lambda x: torch.relu(F.conv2d(x, w, padding=1, groups=groups)) * 0.1 + 1}, x)
    check({"pooling": lambda x: F.avg_pool2d(F.conv2d(x, w, groups=groups) * 0.1, 2) * 0.3}, x, 0.01)


CHAINS: dict[str, Function] = {
    "powers": lambda x: (x * x * x * 0.3) / (x * x + 0.7),
    "numbers": lambda x: (x + 0.1) - 0.1,
    "alpha": lambda x: torch.add(x, x, alpha=0.1) * 0.7,
    "cube": lambda x: (x * 0.7) ** 3 * 0.1,
    "remainder": lambda x: torch.remainder(x, 0.1) + x,
    "fmod": lambda x: torch.fmod(x, 0.3) * 1.1,
    "lerp": lambda x: torch.lerp(x, x * 0.3, 0.3) * 0.1,
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.1) * 3,
    "quotient": lambda x: (x / 0.3) // 0.1,
    "concatenation": lambda x: torch.cat([x * 0.1, x * 0.3]) * 0.7,
}
FUNCTIONS: dict[str, Function] = {
    "softmax": lambda x: torch.softmax(x * 0.1, -1) * 3 - 0.1,
    "layer norm": lambda x: F.layer_norm(x, (64,)) * 3 - 0.1,
    "variance": lambda x: x.var(-1) * 1.7,
    "silu": lambda x: F.silu(x) * F.hardswish(x) + x,
    "tanh": lambda x: torch.tanh(x * 0.1) * 0.3,
    "logit": lambda x: torch.logit(x.sigmoid()) * 0.3,
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 0.5) * 0.3,
    "pooling": lambda x: F.avg_pool1d(x[None], 3)[0] * 0.3 - 0.1,
}


@HALF
def test_a_chain_of_operators(dtype: torch.dtype) -> None:
    """Each operator of a chain rounds, and a number beside a half tensor is rounded where eager rounds it."""
    check(CHAINS, whole_numbers(dtype, 48, 64))


@HALF
def test_a_function_that_rounds_once(dtype: torch.dtype) -> None:
    """A function that eager computes inside in float32 is rounded at its end, not before."""
    check(FUNCTIONS, whole_numbers(dtype, 48, 64), 0.05)


@HALF
def test_scores_that_a_model_writes_out(dtype: torch.dtype) -> None:
    """Scores of written attention that overflow in float16 are infinite, as in eager, and weights sum to 1 about as they do there."""
    x = whole_numbers(dtype, 48, 64) * 0.5
    check({"scaled": lambda x: torch.softmax((x @ x.T) * 0.01, -1) @ x}, x, 1.0)
    large = x * 100
    if dtype == torch.float16:
        assert torch.isnan(torch.softmax((large @ large.T) * 1e-4, -1) @ x).any()
    check({"large": lambda x: torch.softmax((x @ x.T) * 1e-4, -1) @ (x * 1e-2)}, large, 1.0)


OVERFLOWS: dict[str, Function] = {
    "product": lambda x: (x @ x.T) * 1e-3,
    "sum": lambda x: (x * 20).abs().sum(-1) * 1e-3,
    "chain": lambda x: (x * 3e4) * 1e-3,
    "square": lambda x: (x * 100) ** 2 * 1e-3,
    "difference": lambda x: x * x * x - x * x * 7000,
    "convolution": lambda x: F.conv1d(x[None], x[:16, :48, None])[0] * 1e-3,
}


def test_what_overflows_in_float16_stays_infinite() -> None:
    """A float16 result that is too large is infinity for the next operator, as in eager."""
    x = whole_numbers(torch.float16, 48, 64) * 50
    assert not any(fn(x).isfinite().all() for fn in OVERFLOWS.values())
    check(OVERFLOWS, x)
