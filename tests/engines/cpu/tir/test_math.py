"""The TIR expansions of transcendental functions: accuracy against float64, special values, vector code."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engines.cpu.tir.functions_for_tests import SPECIAL, build, run


def grid(low: float, high: float, n: int = 20000) -> torch.Tensor:
    """Evenly spaced points, and as many with evenly spaced exponents."""
    even = torch.linspace(low, high, n, dtype=torch.float64)
    exponents = torch.logspace(-38, math.log10(max(abs(low), abs(high))), n, dtype=torch.float64)
    spread = torch.cat([exponents, -exponents])
    return torch.cat([even, spread[(spread >= low) & (spread <= high)]]).float()


RANGES = [
    ("exp", -87, 88.7, 2e-7),
    ("exp2", -126, 127.9, 2e-7),
    ("expm1", -40, 88.7, 2e-7),
    ("log", 1e-38, 3e38, 3e-7),
    ("log", 0.5, 2, 3e-7),
    ("log2", 1e-38, 3e38, 3e-7),
    ("log2", 0.5, 2, 3e-7),
    ("log10", 0.5, 2, 3e-7),
    ("log1p", -0.999, 3e38, 3e-7),
    ("log1p", -0.5, 1, 3e-7),
    ("tanh", -12, 12, 5e-7),
    ("sigmoid", -87, 87, 3e-7),
    ("erf", -6, 6, 5e-7),
    ("erfc", -6, 9, 2e-6),
    ("tan", -100, 100, 6e-7),
    ("asin", -1, 1, 3e-7),
    ("acos", -1, 0.99, 3e-7),
    ("atan", -1e9, 1e9, 3e-7),
    ("sinh", -88, 88, 3e-7),
    ("cosh", -88, 88, 3e-7),
    ("asinh", -3e38, 3e38, 6e-7),
    ("acosh", 1, 3e38, 6e-7),
    ("atanh", -0.999, 0.999, 6e-7),
]


@pytest.mark.parametrize(("op", "low", "high", "bound"), RANGES)
def test_relative_error(op: str, low: float, high: float, bound: float) -> None:
    """Within the documented relative error of the float64 result, over the whole useful range."""
    x = grid(low, high)
    exact = getattr(torch, op)(x.double())
    keep = exact.abs() > 2.0**-126
    error = ((run(op, x).double() - exact).abs() / exact.abs())[keep]
    assert error.max().item() < bound


def test_exp_nonpositive() -> None:
    """e^x of x <= 0: within 4e-7 where the result is normal, 2e-7 from -20 on; 0 where it is far from normal; NaN stays."""
    for low, bound in ((-87.3, 4e-7), (-20.0, 2e-7)):
        x = grid(low, 0)
        exact = x.double().exp()
        assert ((run("exp_nonpositive", x).double() - exact).abs() / exact).max().item() < bound
    special = torch.tensor([0.0, -0.0, -math.inf, -87.8, -88.0, -104.0, -3.4e38, math.nan])
    want = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.nan])
    torch.testing.assert_close(run("exp_nonpositive", special), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["sin", "cos"])
@pytest.mark.parametrize("high", [10.0, 2.0**30])
def test_sin_cos_absolute_error(op: str, high: float) -> None:
    """sin and cos are right to 2e-7 up to 2^30."""
    x = grid(-high, high)
    assert (run(op, x).double() - getattr(torch, op)(x.double())).abs().max().item() < 2e-7


@pytest.mark.parametrize(
    "op", "exp exp2 expm1 log log2 log10 log1p tanh erf erfc sigmoid sin cos sqrt rsqrt sign floor round_even".split()
)
def test_special_values(op: str) -> None:
    """Infinities, NaN, zeros, denormals and overflow give what eager gives."""
    x = SPECIAL if op not in ("sin", "cos") else SPECIAL[SPECIAL.nan_to_num(posinf=math.inf).abs().ne(3.4e38)]
    reference = getattr(torch, {"round_even": "round"}.get(op, op))(x)
    torch.testing.assert_close(run(op, x), reference, equal_nan=True, rtol=2e-6, atol=1e-44 if op != "erfc" else 1e-37)


def test_pow_matches_c99() -> None:
    """pow of every pair of special values, and its error where the result is large or small."""
    values = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1e-40, 2.5, -2.5, 1e30]
    )
    x, y = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
    torch.testing.assert_close(
        run("pow", x, y), torch.pow(x.double(), y.double()).float(), equal_nan=True, rtol=1e-6, atol=0
    )
    x, y = torch.rand(20000) * 20, torch.rand(20000) * 58 - 29
    exact = torch.pow(x.double(), y.double())
    keep = (exact > 2.0**-126) & (exact < 3.4e38)
    assert ((run("pow", x, y).double() - exact).abs() / exact)[keep].max().item() < 3e-7


@pytest.mark.parametrize(
    "op",
    (
        "exp exp2 expm1 exp_nonpositive log log2 log10 log1p tanh erf erfc sigmoid sin cos tan sqrt rsqrt floor round_even"
    ).split(),
)
def test_code_is_vectorised(op: str) -> None:
    """No function is called for an element."""
    _, assembly = build(op, ["float32"], 1024)
    called = [line.split()[1] for line in assembly.splitlines() if line.split()[:1] in (["callq"], ["bl"])]
    assert not [name for name in called if name.rstrip("@PLT").rstrip("f") in (op, f"{op}f")], called
    if "zmm" in assembly or "ymm" in assembly:
        assert not any(f"{op}f" in line for line in called)
