"""Combination of partial results: every combiner and dtype against eager, along rows and across them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engines.cpu.schedules.reduction.rows_for_tests import COMBINERS, Rows
from torch_hybrid_backend.loops.ir import compute_dtype


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8"])
@pytest.mark.parametrize("combiner", list(COMBINERS))
@pytest.mark.parametrize(("shape", "axes"), [((6, 37), (1,)), ((6, 37), (0,))])
def test_combiners(combiner: str, dtype: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Every combiner on every dtype, accumulated as the body's dtype says, both with the vector axis reduced and kept."""
    if dtype == "uint8" and combiner in ("sum", "prod"):
        pytest.skip("the lowering widens these to int64")
    rows = Rows(shape, axes, dtype)
    rows.store_scalar(rows.reduce(combiner, rows.x), dtype)
    torch_dtype = getattr(torch, dtype)
    x = (torch.rand(shape) * 2 - 1).to(torch_dtype) if torch_dtype.is_floating_point else torch.randint(1, 3, shape)
    x = x.to(torch_dtype)
    wide = x.to(getattr(torch, compute_dtype(dtype)))
    expected = COMBINERS[combiner](wide, axes).to(torch_dtype)
    torch.testing.assert_close(rows.run(x)[0], expected)


@pytest.mark.parametrize("combiner", ["any", "all"])
@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_any_all(combiner: str, axes: tuple[int]) -> None:
    """any and all of bool."""
    rows = Rows((5, 21), axes, "bool")
    rows.store_scalar(rows.reduce(combiner, rows.x), "bool")
    x = torch.rand(5, 21) > (0.9 if combiner == "any" else 0.1)
    assert torch.equal(rows.run(x)[0], getattr(torch, combiner)(x, axes[0]))


@pytest.mark.parametrize("combiner", ["max", "min"])
@pytest.mark.parametrize("axes", [(0,), (1,)])
@pytest.mark.parametrize("place", [0, 20, 63])
def test_extremes_propagate_nan(combiner: str, axes: tuple[int], place: int) -> None:
    """A NaN anywhere in a row is the row's maximum and minimum."""
    rows = Rows((64, 64), axes)
    rows.store_scalar(rows.reduce(combiner, rows.x))
    x = torch.randn(64, 64)
    x[place, 5] = x[7, place] = math.nan
    torch.testing.assert_close(rows.run(x)[0], COMBINERS[combiner](x, axes), equal_nan=True)


@pytest.mark.parametrize("combiner", ["argmax", "argmin"])
@pytest.mark.parametrize("axes", [(0,), (1,)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_arg_extremes(combiner: str, axes: tuple[int], dtype: str) -> None:
    """The first of equals; the first NaN before everything."""
    rows = Rows((33, 50), axes, dtype)
    rows.store_scalar(rows.reduce(combiner, rows.x, "int64"), "int64")
    x = torch.randint(0, 4, (33, 50)).to(getattr(torch, dtype))
    if dtype == "float32":
        x[3, 4] = x[3, 9] = x[11, 4] = math.nan
        x[20, 0] = math.nan
    assert torch.equal(rows.run(x)[0], getattr(torch, combiner)(x, axes[0]))
