"""Each scalar operation on each dtype, by Triton's interpreter beside PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cpu.kernels_for_tests import argument
from tests.engines.triton.programs_for_tests import run_program
from tests.loops.interpret import Frame
from torch_hybrid_backend.engines.triton.functions import converted, template
from torch_hybrid_backend.engines.triton.policy import POLICY
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, as_index, var
from torch_hybrid_backend.loops.ir import FLOAT8, Call, Expr
from torch_hybrid_backend.loops.kernels import MapKernel, Store

pytest.importorskip("triton")

_FLOAT_BINARY = ("add", "sub", "mul", "div", "floordiv", "truncdiv", "mod", "fmod", "pow", "atan2", "max", "min")
_INTEGER_BINARY = (
    "add",
    "sub",
    "mul",
    "floordiv",
    "truncdiv",
    "mod",
    "max",
    "min",
    "bitand",
    "bitor",
    "bitxor",
    "shl",
    "shr",
)


def _values(dtype: torch.dtype, other: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + other)
    if dtype.is_floating_point:
        special = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, float("inf"), float("nan")]
        some = torch.tensor(special[::-1] if other else special, dtype=dtype)
        return torch.cat([some, 2 * torch.randn(300, generator=generator, dtype=dtype)])
    return torch.randint(1 if other else 0, 7, (309,), generator=generator).to(dtype) - (
        0 if dtype == torch.uint8 or other else 3
    )


def _check(op: str, dtype: str, result: str) -> None:
    count = {"fma": 3, "where": 3}.get(op, 2 if op in ops.BINARY | ops.COMPARE | ops.LOGICAL - {"not"} else 1)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    arguments = [argument(309, dtype=dtype) for _ in range(count)]
    out = argument(309, dtype=result)
    i = var("i", 309)
    e: Expr = Call(result, op, tuple(a.buffer.at((i,)) for a in arguments))
    kernel = MapKernel(tuple(arguments), (out,), (LoopVar("i", 309),), (Store(out.buffer, (i,), e),))
    inputs = {a.buffer: _values(torch_dtype, n % 2 == 1) for n, a in enumerate(arguments)}
    (got,) = run_program(kernel, inputs)
    frame = Frame((309,), inputs, [LoopVar("i", 309)])
    torch.testing.assert_close(got, frame.expr(e, None), rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", sorted(ops.UNARY - {"bitnot", "exp_nonpositive"} | set(_FLOAT_BINARY) | {"fma"}))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats(op: str, dtype: str) -> None:
    _check(op, dtype, dtype)


@pytest.mark.parametrize("op", ["neg", "abs", "sign", "bitnot", *_INTEGER_BINARY, "pow", "fma"])
@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8"])
def test_integers(op: str, dtype: str) -> None:
    _check(op, dtype, dtype)


@pytest.mark.parametrize("op", sorted(ops.COMPARE))
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_comparisons(op: str, dtype: str) -> None:
    _check(op, dtype, "bool")


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ScheduleError, match="'shl' has no code for dtype float32"):
        template("shl", "float32", "float32")


def test_conversions() -> None:
    """A NaN is true; a float becomes a narrow integer by way of a wide one."""
    assert converted("x", "float32", "bool") == "x != 0"
    assert converted("x", "float32", "int8") == "x.to(tl.int32).to(tl.int8)"
    assert converted("x", "int64", "int64") == "x"


@pytest.mark.parametrize("dtype", FLOAT8)
def test_floats_of_8_bits(dtype: str) -> None:
    """Every pattern is read as PyTorch reads it, and what it writes is what PyTorch writes, bit for bit: ties, denormals, what is too large,
    infinities and NaN of both signs."""
    if not POLICY.abilities.float8:
        pytest.skip("this torch makes NaN of what is too large for float8_e4m3fn")
    torch_dtype: torch.dtype = getattr(torch, dtype)
    every = torch.arange(256).to(torch.uint8).view(torch_dtype)
    values = every.float()[every.float().isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    beyond = torch.tensor([449.0, 463, 464, 465, 480, 1e4, 57345, 61439, 61440, 7e4, 3e38, torch.inf, torch.nan, 1e-30])
    numbers = torch.cat(
        [values, middles, torch.nextafter(middles, values[1:]), torch.nextafter(middles, values[:-1]), beyond]
    )
    numbers = torch.cat([numbers, -numbers])
    (got,) = _copied(numbers, "float32", dtype)
    assert torch.equal(got.view(torch.uint8), numbers.to(torch_dtype).view(torch.uint8))
    (wide,) = _copied(every, dtype, "float32")
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(wide.signbit(), every.float().signbit())


def _copied(x: torch.Tensor, source: str, target: str) -> list[torch.Tensor]:
    a, out, i = argument(len(x), dtype=source), argument(len(x), dtype=target), var("i", len(x))
    kernel = MapKernel((a,), (out,), (LoopVar("i", len(x)),), (Store(out.buffer, (i,), a.buffer.at((i,))),))
    return run_program(kernel, {a.buffer: x})


def test_the_sign_of_zero() -> None:
    """-0.0 is made of 0.0: `-` of Triton's is 0 - x."""
    a, out, i = argument(2), argument(2), var("i", 2)
    e = ops.call("neg", a.buffer.at((i,)))
    kernel = MapKernel((a,), (out,), (LoopVar("i", 2),), (Store(out.buffer, (i,), e),))
    (got,) = run_program(kernel, {a.buffer: torch.tensor([0.0, -0.0])})
    assert got.signbit().tolist() == [True, False]


def test_one_number_beside_many() -> None:
    """Comparisons, and functions of libdevice, of one number and a block: the interpreter takes them as a GPU does."""
    a, b, out, i = argument(9), argument(1), argument(9, dtype="bool"), var("i", 9)
    x, y = a.buffer.at((i,)), b.buffer.at((as_index(0),))
    e = ops.call("and", ops.call("gt", x, ops.const(0, "float32")), ops.call("gt", y, ops.const(0, "float32")))
    e = ops.call("or", e, ops.call("lt", ops.call("fmod", y, x), ops.const(0.5, "float32")))
    kernel = MapKernel((a, b), (out,), (LoopVar("i", 9),), (Store(out.buffer, (i,), e),))
    numbers, one = torch.linspace(-4, 4, 9) + 0.3, torch.tensor([3.0])
    (got,) = run_program(kernel, {a.buffer: numbers, b.buffer: one})
    assert torch.equal(got, ((numbers > 0) & (one > 0)) | (torch.fmod(one, numbers) < 0.5))
