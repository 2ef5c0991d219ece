"""Scalar formulas against eager, at the values where they are hard: every pair of small integers, and floats' special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from loops.interpret import evaluate, torch_dtype
from torch_hybrid_backend.loops.ir import Buffer, Const, Expr, Map, MapOp, count_calls, domain_vars, parts
from torch_hybrid_backend.loops.lowerings import arithmetic
from torch_hybrid_backend.loops.ops import const

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.25, 1e-30, -3e38, 3e38])


def _computed(formula: Callable[..., Expr], *operands: torch.Tensor) -> torch.Tensor:
    """The formula for every element of the operands, which broadcast."""
    tensors = torch.broadcast_tensors(*operands)
    names = [str(t.dtype).removeprefix("torch.") for t in tensors]
    buffers = [Buffer(tuple(t.shape), name) for t, name in zip(tensors, names, strict=True)]
    scalars = [buffer.at(domain_vars(buffer.shape)) for buffer in buffers]
    dtype = formula(*scalars).dtype
    value = Map(buffers[0].shape, dtype, lambda index: formula(*(buffer.at(index) for buffer in buffers)))
    env = dict(zip(buffers, tensors, strict=True))
    evaluate(MapOp(out := Buffer(value.shape, dtype), value), env)
    assert env[out].dtype == torch_dtype(dtype)
    return env[out]


def _pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    limits = torch.iinfo(dtype)
    every = torch.arange(limits.min, limits.max + 1).to(dtype)
    return every[:, None], every[None, :]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ["trunc_div", "floor_div", "remainder", "fmod"])
def test_every_quotient_of_small_integers(name: str, dtype: torch.dtype) -> None:
    """Each pair gives what eager gives; by zero, where eager raises, no instruction traps: the dividend, and a remainder of 0."""
    a, b = _pairs(dtype)
    found = _computed(getattr(arithmetic, name), a, b)
    eager: dict[str, Callable[..., torch.Tensor]] = {
        "trunc_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        "floor_div": lambda x, y: torch.div(x, y, rounding_mode="floor"),
        "remainder": torch.remainder,
        "fmod": torch.fmod,
    }
    # In int64, where no quotient overflows: the smallest number by -1 wraps.
    expected = eager[name](a.long(), b.long().where(b != 0, 1)).to(dtype)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["trunc_div", "floor_div", "remainder", "fmod"])
@pytest.mark.parametrize("divisor", [0, -1, 1, 3, -4])
def test_literal_divisors_need_no_test_of_them(name: str, divisor: int) -> None:
    """Code of literal divisors has no condition, and divides neither by 0 nor by -1."""
    a, _ = _pairs(torch.int8)

    def formula(x: Expr) -> Expr:
        return getattr(arithmetic, name)(x, const(divisor, "int8"))

    found = formula(Buffer((1,), "int8").at(domain_vars((1,))))
    operations = [part for part in parts([found]) if not isinstance(part, Const)]
    assert not [part for part in operations if getattr(part, "op", "") in ("where", "eq", "or")]
    assert all(
        part.args[1].value not in (0, -1)
        for part in operations
        if getattr(part, "op", "") in ("truncdiv", "floordiv", "mod")
    )
    assert torch.equal(
        _computed(formula, a), _computed(getattr(arithmetic, name), a, torch.tensor(divisor, dtype=torch.int8))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_quotients_of_floats(dtype: torch.dtype) -> None:
    """Special values, zeros of either sign, and quotients that rounding would take to the next integer."""
    tricky = torch.tensor([0.3, 0.1, 1.1, 4.35, 1 / 3, 12345.678, 1e9 + 0.5])
    # Without the smallest and largest: for quotients beyond float32, vectorised torch.fmod itself gives NaN.
    values = torch.cat([SPECIAL[:-3], tricky, -tricky]).to(dtype)
    a, b = values[:, None], values[None, :]
    for formula, eager in (
        (arithmetic.floor_div, torch.floor_divide),
        (arithmetic.remainder, torch.remainder),
        (arithmetic.fmod, torch.fmod),
        (arithmetic.trunc_div, lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    ):
        torch.testing.assert_close(_computed(formula, a, b), eager(a, b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_every_shift(dtype: torch.dtype) -> None:
    """Places from 0 to 7 as eager; all others, negative ones too, shift everything out and leave 0, or the sign on the way right."""
    a, places = _pairs(dtype)
    wide, legal = a.long(), (places >= 0) & (places < 8)
    left = (wide << places.long().clamp(0, 7)).to(dtype).where(legal, 0)
    right = (wide >> places.long().clamp(0, 7)).to(dtype).where(legal, torch.where(a < 0, -1, 0).to(dtype))
    assert torch.equal(_computed(lambda x, n: arithmetic.shift("shl", x, n), a, places), left)
    assert torch.equal(_computed(lambda x, n: arithmetic.shift("shr", x, n), a, places), right)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, -1, -2, 0.5, -0.5, 1.7])
def test_powers_of_floats(exponent: float) -> None:
    """Powers are eager's, special values too: 0 to a negative power is infinite, NaN to the power of 0 is 1."""
    found = _computed(lambda x: arithmetic.power(x, exponent), SPECIAL)
    torch.testing.assert_close(found, SPECIAL**exponent, equal_nan=True)


@pytest.mark.parametrize("exponent", [0, 1, 5, 7, 31, 64])
def test_powers_of_integers_wrap_and_are_short(exponent: int) -> None:
    """The product modulo the integer's range, by squaring: at most twice as many products as the exponent has bits."""
    a, _ = _pairs(torch.int8)
    assert torch.equal(_computed(lambda x: arithmetic.power(x, exponent), a), a**exponent)
    expr = arithmetic.integer_power(Buffer((1,), "int8").at(domain_vars((1,))), exponent)
    assert count_calls(expr) <= 2 * exponent.bit_length()


def test_large_numbers_do_not_overflow_on_the_way() -> None:
    """Lengths and logarithms of sums are finite wherever the result is; infinities win over NaN in a length, as in eager."""
    a, b = SPECIAL[:, None], SPECIAL[None, :]
    torch.testing.assert_close(_computed(arithmetic.hypot, a, b), torch.hypot(a, b), equal_nan=True)
    logarithms = (("exp", "log", torch.logaddexp), ("exp2", "log2", torch.logaddexp2))
    for exp, log, eager in logarithms:
        found = _computed(lambda x, y, exp=exp, log=log: arithmetic.log_add_exp(x, y, exp, log), a, b)
        torch.testing.assert_close(found, eager(a, b), equal_nan=True)
    torch.testing.assert_close(
        _computed(arithmetic.log_sigmoid, SPECIAL), torch.nn.functional.logsigmoid(SPECIAL), equal_nan=True
    )


def test_signs_and_limits() -> None:
    """The sign of zero counts, NaN passes a clamp, 0 times a logarithm is 0, and a mixture is exact at both ends."""
    a, b = SPECIAL[1:, None], SPECIAL[None, 1:]
    found, expected = _computed(arithmetic.copysign, a, b), torch.copysign(a, b)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())
    torch.testing.assert_close(_computed(arithmetic.xlogy, a, b), torch.xlogy(a, b), equal_nan=True)
    low, high = torch.tensor(-1.0), torch.tensor(2.0)
    found = _computed(arithmetic.clamp, SPECIAL, low, high)
    assert torch.equal(found.isnan(), SPECIAL.isnan())
    torch.testing.assert_close(found, SPECIAL.clamp(-1, 2), equal_nan=True)
    x = Buffer((1,), "float32").at(domain_vars((1,)))
    assert arithmetic.clamp(x, None, None) is x
    ends = torch.tensor([0.1, 1.0, -7.3, 1e10]), torch.tensor([0.3, -1.0, 1e-8, 1.0])
    for weight, end in ((0.0, ends[0]), (1.0, ends[1])):
        assert torch.equal(_computed(arithmetic.lerp, *ends, torch.tensor(weight)), end)


def test_truth_is_added_by_or_and_multiplied_by_and() -> None:
    """A sum of booleans is "either" and a product "both"; a factor of 1 costs nothing."""
    yes_no = torch.tensor([False, True])
    assert torch.equal(_computed(arithmetic.plus, yes_no[:, None], yes_no), yes_no[:, None] | yes_no)
    assert torch.equal(_computed(arithmetic.times, yes_no[:, None], yes_no), yes_no[:, None] & yes_no)
    x = Buffer((1,), "float32").at(domain_vars((1,)))
    assert arithmetic.scaled(x, 1) is x
    assert count_calls(arithmetic.scaled(x, 2.0)) == 1
