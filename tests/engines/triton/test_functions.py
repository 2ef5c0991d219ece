"""Each scalar operation on each dtype, by Triton's interpreter beside PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.engines.triton.programs_for_tests import run_program
from tests.engines.tvm.kernels_for_tests import argument
from tests.loops.interpret import Frame
from torch_hybrid_backend.engines.triton.functions import converted, template
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, var
from torch_hybrid_backend.loops.ir import Call, Expr
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
