"""Creation operators against eager."""

from __future__ import annotations

import math

import pytest
import torch

from loops.check import EVERYTHING, FLOATS, check, sample
from loops.interpret import trace
from torch_hybrid_backend.loops.lowering import supports

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_constants(dtype: torch.dtype) -> None:
    """Fill values are converted to the dtype, half types included."""
    x = sample(2, 3)
    check(lambda a: aten.full.default([2, 3], 3.7, dtype=dtype, device=CPU), x)
    check(lambda a: aten.full_like.default(a, 3.7, dtype=dtype), x)
    check(lambda a: aten.zeros_like.default(a, dtype=dtype), x)
    check(lambda a: aten.ones_like.default(a, dtype=dtype), x)
    check(lambda a: aten.zeros.default([], dtype=dtype, device=CPU), x)
    check(lambda a: aten.ones.default([1, 2], dtype=dtype, device=CPU), x)
    check(lambda a: aten.new_full.default(a, [4], 1, dtype=dtype), x)
    check(lambda a: aten.new_zeros.default(a, [4], dtype=dtype), x)
    check(lambda a: aten.scalar_tensor.default(1.3, dtype=dtype, device=CPU), x)
    check(lambda a: aten.eye.m(3, 4, dtype=dtype, device=CPU), x)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e-40, -0.0])
def test_special_constants(value: float) -> None:
    """Infinities, NaN and denormals survive."""
    check(lambda a: aten.full.default([2], value, device=CPU), sample(1))
    check(lambda a: aten.full.default([2], value, dtype=torch.bfloat16, device=CPU), sample(1))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
def test_progressions(dtype: torch.dtype) -> None:
    """Ranges of integers, and of floats with broken steps."""
    x = sample(1)
    check(lambda a: aten.arange.default(7, dtype=dtype, device=CPU), x)
    check(lambda a: aten.arange.start(2, 9, dtype=dtype, device=CPU), x)
    check(lambda a: aten.arange.start_step(9, -3, -2, dtype=dtype, device=CPU), x)
    if not dtype.is_floating_point:
        check(
            lambda a: torch.ops.prims.iota.default(5, start=3, step=2, dtype=dtype, device=CPU, requires_grad=False), x
        )
    else:
        check(lambda a: aten.arange.start_step(0.5, 2.5, 0.3, dtype=dtype, device=CPU), x)


def test_uninitialised_is_refused() -> None:
    """An uninitialised tensor is refused: it has no value to describe."""
    graph = trace(aten.empty_like.default, [sample(3)]).graph
    (node,) = (n for n in graph.nodes if n.op == "call_function")
    assert not supports(node)


@pytest.mark.parametrize("source", EVERYTHING, ids=str)
@pytest.mark.parametrize("target", EVERYTHING, ids=str)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    """A cast truncates, widens, rounds to half types and tests for zero as eager's does."""
    x = sample(3, 5, dtype=source, low=0 if target == torch.uint8 else -3)
    check(lambda a: aten._to_copy.default(a, dtype=target), x)
    check(lambda a: torch.ops.prims.convert_element_type.default(a, target), x)


def test_cast_to_half_rounds_in_the_middle() -> None:
    """float32 -> bfloat16 -> float32 loses the bits that eager loses, though nothing is stored in between."""
    x = sample(100)
    check(lambda a: a.to(torch.bfloat16).to(torch.float32) - a, x)
    check(lambda a: a.to(torch.float16).to(torch.float32) - a, x)


def test_copy_and_fill() -> None:
    """copy takes the destination's dtype and shape; fill a tensor's number."""
    check(aten.copy.default, sample(3, 4, dtype=torch.int64), sample(4))
    check(aten.fill.Tensor, sample(3, 4), torch.tensor(2))
    check(lambda a: aten.fill.Scalar(a, 3), sample(3, 4, dtype=torch.int64))
