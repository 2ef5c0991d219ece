"""Row kernels whose vector axis is reduced, against eager: rows one after the other, and rows that all threads share."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engines.cpu.schedule_runner import NARROW
from tests.engines.cpu.schedules.reduction.rows_for_tests import Rows, emitted
from torch_hybrid_backend.loops import ops


@pytest.mark.parametrize(
    ("shape", "axes"), [((3, 1, 5), (1,)), ((4, 37), (0, 1)), ((2, 19, 5), (1, 2)), ((1, 1), (1,))]
)
def test_arg_extremes_of_computed_values(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Positions count over all reduced axes, row-major; what is computed is computed once."""
    rows = Rows(shape, axes)
    value = ops.add(ops.mul(rows.x, ops.const(3.1, "float32")), ops.const(0.7, "float32"))
    rows.store_scalar(rows.reduce("argmax", value, "int64"), "int64")
    x = torch.randn(shape)
    expected = (x * 3.1 + 0.7).flatten(axes[0], axes[-1]).argmax(axes[0])
    assert torch.equal(rows.run(x)[0], expected)


# Fewer rows than cores (3), each longer than what is worth a thread, in whole vectors and not.
LONG = [((1, 200_003), (1,)), ((2, 98_304), (1,)), ((2, 3, 40_001), (1, 2)), ((1, 49_152), (1,))]


@pytest.mark.parametrize(("shape", "axes"), LONG)
def test_long_rows_are_shared_by_the_cores(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Softmax and the largest element's position over few long rows, in pieces; a NaN in any piece reaches the result."""
    rows = Rows(shape, axes)
    top = rows.reduce("max", rows.x)
    e = rows.map(ops.call("exp", ops.sub(rows.x, top)))
    rows.store(ops.div(e, rows.reduce("sum", e)))
    place = rows.reduce("argmax", rows.x, "int64")
    rows.store_scalar(place, "int64")
    x = torch.randn(shape)
    softmax, position = rows.run(x, NARROW)
    exact = x.double().flatten(1).softmax(1).view(shape).float()
    torch.testing.assert_close(softmax, exact, atol=1e-8, rtol=1e-5)
    assert torch.equal(position, x.flatten(1).argmax(1))
    for element in (0, 49_151, x[0].numel() - 1):
        broken = x.clone()
        broken.view(shape[0], -1)[0, element] = math.nan
        softmax, position = rows.run(broken, NARROW)
        assert softmax[0].isnan().all()
        assert position[0] == element


def test_a_long_sum_is_shared_by_the_cores() -> None:
    """The pieces of a row run in a parallel loop; rows enough for the cores are not cut."""
    for rows_count, cut in ((1, True), (3, False)):
        rows = Rows((rows_count, 100_000), (1,))
        rows.store_scalar(rows.reduce("sum", rows.x))
        x = torch.randn(rows_count, 100_000)
        torch.testing.assert_close(rows.run(x, NARROW)[0], x.double().sum(1).float(), atol=1e-2, rtol=1e-5)
        source = emitted(rows, NARROW)
        assert ("partial" in source) == cut


def test_a_long_sum_is_as_exact_as_eager() -> None:
    """Partial sums keep a long float32 row as close to the true sum as eager does."""
    x = torch.rand(2, 100_003)
    rows = Rows(tuple(x.shape), (1,))
    rows.store_scalar(rows.reduce("sum", rows.x))
    exact = x.double().sum(1)
    ours = (rows.run(x)[0].double() - exact).abs().max()
    eager = (x.sum(1).double() - exact).abs().max()
    assert ours <= max(4 * eager.item(), 1e-6 * exact.max().item())


def test_a_row_too_long_for_the_stack() -> None:
    """A row buffer of a megabyte works, and is taken from the heap."""
    rows = Rows((2, 300_000), (1,))
    top = rows.reduce("max", rows.x)
    e = rows.map(ops.call("exp", ops.sub(rows.x, top)))
    rows.store(ops.div(e, rows.reduce("sum", e)))
    x = torch.randn(2, 300_000)
    torch.testing.assert_close(rows.run(x)[0], x.softmax(1))
