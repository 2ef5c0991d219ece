"""Values at the ends of a dtype's range, far from zero, and beside infinities and NaN are eager's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Function = Callable[..., Tensor]
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, or an error: nothing falls back to eager."""
    monkeypatch.setenv("HYBRID_STRICT", "1")


def later_call(functions: Mapping[str, Function], x: Tensor) -> list[Tensor]:
    """Run a later call; kernels are compared with eager on ordinary numbers, in the first one."""
    compiled = torch.compile(lambda x: [fn(x) for fn in functions.values()], backend="hybrid")
    ordinary = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.dtype) + 1
    with torch.no_grad():
        for _ in range(2):
            compiled(ordinary)
        found: list[Tensor] = compiled(x)
        return found


def extremes(dtype: torch.dtype) -> Tensor:
    """Specials, numbers near the ends of the range, and where exponentials overflow."""
    info = torch.finfo(dtype)
    steps = torch.cat(
        [
            torch.tensor(
                [0.0, 1e-40, 1e-8, 0.5, 1.0, 2.0, 12.0, 20.0, 88.9, 100.0, 150.0, 720.0, 1e19, 3e30, 3e38]
            ).double()
        ]
    )
    specials = torch.tensor([math.inf, math.nan, info.max, info.max / 2], dtype=torch.float64)
    positive = torch.cat([steps, specials])
    return torch.cat([positive, -positive, positive[:-6]]).to(dtype)


DIFFERENCES: dict[str, Function] = {
    "exp": lambda x: torch.exp(x) - torch.exp(x / 2),
    "exp2": lambda x: torch.exp2(x) - torch.exp2(x / 1.5),
    "expm1": lambda x: torch.expm1(x) - torch.expm1(x / 1.5),
    "squares": lambda x: x * x - (x * 2) * (x * 3),
    "product and sum": lambda x: x * 3e38 - x * x,
    "cube": lambda x: x**3 - x**2,
    "scaled": lambda x: torch.exp(x) * 2 - torch.exp(x) * 3,
    "root": lambda x: torch.sqrt(x * x + 1) - x.abs() * 2,
}


@FLOATS
def test_the_difference_of_what_overflows(dtype: torch.dtype) -> None:
    """inf - inf is NaN: no multiply-add keeps a product from overflowing."""
    x = extremes(dtype)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-9, torch.bfloat16: 2e-2}[dtype]
    for (name, fn), got in zip(DIFFERENCES.items(), later_call(DIFFERENCES, x), strict=True):
        assert torch.equal(got.isnan(), fn(x).isnan()), name
        torch.testing.assert_close(got, fn(x), rtol=tolerance, atol=1e-37, equal_nan=True, msg=name)


ACTIVATIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    **{
        name: getattr(F, name)
        for name in "silu mish softplus logsigmoid elu selu celu hardswish hardsigmoid softsign relu6".split()
    },
    **{
        name: getattr(torch, name)
        for name in "sigmoid tanh acosh asinh atanh log1p logit sinc frac rsqrt erf erfc".split()
    },
    "remainder": lambda x: torch.remainder(x, 2.0),
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "xlogy": lambda x: torch.xlogy(x, x),
    "hypot": lambda x: torch.hypot(x, x),
}


@FLOATS
def test_functions_of_infinity_nan_and_large_numbers(dtype: torch.dtype) -> None:
    """Infinities, NaN and the largest numbers give what they give in eager: the sign of an infinity, NaN, or a number."""
    x = extremes(dtype)
    relative, absolute = {torch.float32: (1e-5, 1e-37), torch.float64: (1e-11, 1e-37), torch.bfloat16: (1e-2, 1e-7)}[
        dtype
    ]
    for (name, fn), got in zip(ACTIVATIONS.items(), later_call(ACTIVATIONS, x), strict=True):
        torch.testing.assert_close(got, fn(x), rtol=relative, atol=absolute, equal_nan=True, msg=name)


def test_angles_of_any_size() -> None:
    """sin, cos and tan of every float32: those beyond 1e13, near multiples of pi/2, denormal ones, and infinity."""
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).int()
    turns = (torch.arange(1.0, 50_000) * (math.pi / 2)).float()
    special = torch.tensor([1e13, 3e22, 3.4e38, -0.0, 1e-40, 5.4e25, math.inf, -math.inf, math.nan])
    x = torch.cat([bits.view(torch.float32), turns, special])
    functions: dict[str, Function] = {"sin": torch.sin, "cos": torch.cos, "tan": torch.tan}
    for fn, got in zip(functions.values(), later_call(functions, x), strict=True):
        torch.testing.assert_close(got.double(), fn(x.double()), rtol=4e-7, atol=1e-45, equal_nan=True)


SPREADS: dict[str, Function] = {
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "std of columns": lambda x: x.std(0),
    "var of all": lambda x: x.var(),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
    "biased var": lambda x: x.var(-1, correction=0),
    "var of channels": lambda x: x.reshape(4, 8, -1).var((0, 2)),
}
MEANS = pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (1e4, 0.01), (1.7e9, 1e4), (-300.0, 0.1)])


def far_from_zero(mean: float, deviation: float) -> Tensor:
    """(32, 512) numbers."""
    return (
        torch.randn(32, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * deviation + mean
    ).float()


@MEANS
def test_the_variance_of_numbers_far_from_zero(mean: float, deviation: float) -> None:
    """Time stamps, or a constant with little noise: within 1e-6 of float64."""
    x = far_from_zero(mean, deviation)
    for (name, fn), got in zip(SPREADS.items(), later_call(SPREADS, x), strict=True):
        torch.testing.assert_close(got.double(), fn(x.double()), rtol=1e-6, atol=0, msg=name)


NORMS: dict[str, Function] = {
    "layer norm": lambda x: F.layer_norm(x, (512,)),
    "group norm": lambda x: F.group_norm(x.reshape(4, 8, 16, 32), 4),
    "instance norm": lambda x: F.instance_norm(x.reshape(4, 8, 16, 32)),
    "batch norm": lambda x: F.batch_norm(x.reshape(4, 8, 16, 32), None, None, training=True),
}


@MEANS
def test_norms_of_numbers_far_from_zero(mean: float, deviation: float) -> None:
    """Norms are as near to float64 as eager is, which subtracts a mean of float32."""
    x = far_from_zero(mean, deviation)
    for (name, fn), got in zip(NORMS.items(), later_call(NORMS, x), strict=True):
        off, of_eager = ((result.double() - fn(x.double())).abs().max() for result in (got, fn(x)))
        assert off <= max(2 * of_eager, 1e-6), name


def test_a_constant_has_no_variance() -> None:
    """Rounding makes no variance negative, and no root of one NaN."""
    x = torch.full((8, 1000), 1e4 + 1 / 3)
    (got,) = later_call({"std": lambda x: x.std(-1)}, x)
    assert (got < 1e-3).all()


@pytest.mark.parametrize("channels", [3, 16, 64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_pixel_of_an_image(value: float, channels: int) -> None:
    """An infinite or NaN pixel reaches the outputs whose windows hold it, and no others."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, channels, 3, 3, generator=generator)
    x = torch.randn(1, channels, 28, 28, generator=generator)
    x[0, channels // 2, 9, 27] = value

    def convolution(x: Tensor) -> Tensor:
        return F.conv2d(x, w, padding=1)

    (got,) = later_call({"convolution": convolution}, x)
    torch.testing.assert_close(got, convolution(x), rtol=1e-4, atol=1e-4, equal_nan=True)
