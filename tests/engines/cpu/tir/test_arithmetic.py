"""Scalar operations as TIR: every dtype's special cases as eager has them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from tvm import tirx

from tests.engines.cpu.tir.functions_for_tests import SPECIAL, run
from torch_hybrid_backend.engines.cpu.tir import arithmetic
from torch_hybrid_backend.errors import ScheduleError


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_propagate_nan(op: str) -> None:
    """max and min are NaN where either side is."""
    x, y = (v.flatten() for v in torch.meshgrid(SPECIAL, SPECIAL, indexing="ij"))
    reference = (torch.maximum if op == "max" else torch.minimum)(x, y)
    torch.testing.assert_close(run(op, x, y), reference, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("op", ["mod", "fmod", "floordiv"])
def test_float_division(op: str) -> None:
    """Remainders and floor division of floats as eager's, signs and zero divisors included."""
    values = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -7.5, 7.5, 3.0, -3.0, 1e10, 0.1, math.nan])
    x, y = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
    reference = {"mod": torch.remainder, "fmod": torch.fmod, "floordiv": torch.floor_divide}[op](x, y)
    torch.testing.assert_close(run(op, x, y), reference, equal_nan=True)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of special integers."""
    info = torch.iinfo(dtype)
    values = torch.tensor([0, 1, 2, 3, 7, 8, info.max - 1, info.max, *([-1, -2, -7, info.min] if info.min else [])])
    x, y = torch.meshgrid(values.to(dtype), values.to(dtype), indexing="ij")
    return x.flatten(), y.flatten()


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ["floordiv", "truncdiv", "mod", "fmod"])
def test_integer_division(op: str, dtype: torch.dtype) -> None:
    """Integers are divided as Python, or as C, divides; neither a zero divisor nor the lowest number by -1 stops the process."""
    x, y = pairs(dtype)
    defined = (y != 0) & ~((x == torch.iinfo(dtype).min) & (y.long() == -1))
    reference: dict[str, Callable[..., torch.Tensor]] = {
        "floordiv": torch.floor_divide,
        "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        "mod": torch.remainder,
        "fmod": torch.fmod,
    }
    assert torch.equal(run(op, x, y)[defined], reference[op](x[defined], y[defined]))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_power(dtype: torch.dtype) -> None:
    """Modulo the range; a negative exponent gives 0 but for bases 1 and -1."""
    x, y = pairs(dtype)
    bits = torch.iinfo(dtype).bits

    def power(a: int, b: int) -> int:
        if b < 0:
            return a**b if a in (1, -1) else 0
        result = pow(a, b, 1 << bits)
        return result - (1 << bits) if dtype.is_signed and result >> (bits - 1) else result

    want = torch.tensor([int(power(a, b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)], dtype=dtype)
    assert torch.equal(run("pow", x, y), want)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ["shl", "shr"])
def test_shifts(op: str, dtype: torch.dtype) -> None:
    """Shifting by all bits or by a negative count gives 0, or the sign, as eager."""
    x, y = pairs(dtype)
    reference = torch.bitwise_left_shift if op == "shl" else torch.bitwise_right_shift
    assert torch.equal(run(op, x, y), reference(x, y))


@pytest.mark.parametrize("op", ["add", "mul", "and", "or", "xor", "bitand", "bitor", "bitxor", "eq", "ne", "lt"])
def test_truth_tables(op: str) -> None:
    """Operations of bool: a sum is an or, a product an and."""
    x, y = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    table = {
        "and": x & y, "mul": x & y, "bitand": x & y,
        "or": x | y, "add": x | y, "bitor": x | y,
        "xor": x ^ y, "bitxor": x ^ y, "ne": x ^ y, "eq": ~(x ^ y), "lt": ~x & y,
    }  # fmt: skip
    assert torch.equal(run(op, x, y), table[op])


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_comparisons_with_nan(op: str, dtype: torch.dtype) -> None:
    """All are false but for `ne`; of one and the same variable too."""
    x, y = (v.flatten().to(dtype) for v in torch.meshgrid(SPECIAL, SPECIAL, indexing="ij"))
    assert torch.equal(run(op, x, y, dtype=torch.bool), getattr(torch, op)(x, y))


CASTS = [
    (torch.float32, torch.int8, [0.0, -0.9, 1.9, -127.5, 200.0, -200.0, 65536.5]),
    (torch.float32, torch.uint8, [0.0, 0.9, 255.5, 256.0, -1.0]),
    (torch.float64, torch.int64, [0.0, -0.9, 2.0**52 + 1, -(2.0**60)]),
    (torch.float32, torch.bool, [0.0, -0.0, 1e-40, math.nan, math.inf]),
    (torch.int32, torch.bool, [0, 1, -1, 256]),
    (torch.bool, torch.float32, [False, True]),
    (torch.bool, torch.int64, [False, True]),
    (torch.int64, torch.int8, [127, 128, -129, 1 << 40]),
    (torch.int32, torch.uint8, [255, 256, -1]),
    (torch.float64, torch.float32, [1e300, 0.1, math.nan]),
]


@pytest.mark.parametrize(("source", "target", "values"), CASTS)
def test_casts(source: torch.dtype, target: torch.dtype, values: list[float]) -> None:
    """Casts are eager's: integers wrap, floats are cut off, what is not zero is true, a NaN as well."""
    x = torch.tensor(values, dtype=source)
    torch.testing.assert_close(run("cast", x, dtype=target), x.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "op", "sigmoid expm1 log1p asinh acosh atanh erf erfc exp log tan atan sqrt rsqrt exp_nonpositive".split()
)
def test_float64_functions(op: str) -> None:
    """Elementary functions of float64 are computed in float64."""
    inside = {"acosh": (1.0, 50.0), "atanh": (-0.99, 0.99), "log1p": (-0.99, 50.0), "exp_nonpositive": (-50.0, 0.0)}
    low, high = inside.get(op, (1e-3, 20.0))
    x = torch.linspace(low, high, 401, dtype=torch.float64)
    reference = torch.exp if op == "exp_nonpositive" else getattr(torch, op)
    torch.testing.assert_close(run(op, x), reference(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8])
@pytest.mark.parametrize("op", ["neg", "abs", "sign"])
def test_signs(op: str, dtype: torch.dtype) -> None:
    """-0.0 is the negative of 0.0; unsigned numbers wrap, and have no negative ones."""
    x = SPECIAL if dtype == torch.float32 else torch.tensor([0, 1, 2, 127, -1, -128], dtype=torch.int32).to(dtype)
    got, want = run(op, x), getattr(torch, op)(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if op == "neg" and dtype == torch.float32:
        assert torch.equal(got.signbit()[1:], want.signbit()[1:])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_operands_that_are_printed_once(dtype: str) -> None:
    """The promise of `prints_operands_once` holds: an expression in an operand's place is computed once."""
    counts = {"fma": 3, "where": 3}
    promised = [
        op
        for op in (*arithmetic.COMPARISONS, "add", "sub", "mul", "fma", "where", "div", "max", "pow")
        if arithmetic.prints_operands_once(op, dtype)
    ]
    assert len(promised) == (11 if dtype.startswith("float") else 6)
    for op in promised:
        operands = tuple(tirx.Var(f"v{n}", dtype) for n in range(counts.get(op, 2)))
        if op == "where":
            operands = (tirx.Var("c", "bool"), *operands[1:])
        printed = str(arithmetic.emit(op, dtype, operands, dtype, lambda value, _: value))
        assert [len(re.findall(rf"\b{each.name}\b", printed)) for each in operands] == [1] * len(operands), printed


@pytest.mark.parametrize(("op", "dtype"), [("no such operation", "float32"), ("sin", "int32"), ("erf", "int64")])
def test_what_has_no_meaning(op: str, dtype: str) -> None:
    """The error names the operation and the dtype."""
    with pytest.raises(ScheduleError, match=f"{op}.*{dtype}"):
        arithmetic.emit(op, dtype, (tirx.Var("x", dtype),), dtype, lambda value, _: value)
