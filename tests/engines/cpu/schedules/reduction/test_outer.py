"""Row kernels whose vector axis is kept, against eager: a lane for each row."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW
from tests.engines.cpu.schedules.reduction.rows_for_tests import COMBINERS, Rows, emitted, number
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided, contiguous


@pytest.mark.parametrize("layout", [None, Blocked(16), Blocked(8), Strided((700, 1, 140, 20))])
@pytest.mark.parametrize("combiner", ["max", "sum"])
def test_pooling_with_padding(combiner: str, layout: Layout | None) -> None:
    """A 3x3 window, stride 2, padding 1: the guard keeps loads inside. Channels do not fill the last block."""
    n, c, h, w = 2, 20, 5, 7
    out_h, out_w = 3, 4
    rows = Rows((n, c, out_h, out_w, 3, 3), (4, 5))
    image = Buffer((n, c, h, w), "float32", "image")
    rows.input, rows.reads = image, [Argument(image, layout or contiguous(image.shape))]
    i = rows.index
    y, x = i[2] * 2 + i[4] - 1, i[3] * 2 + i[5] - 1
    inside = ops.logical_and(ops.index_in(y, 0, h), ops.index_in(x, 0, w))
    outside = number(-math.inf if combiner == "max" else 0)
    value = ops.guard(inside, image.at((i[0], i[1], y, x)), outside)
    kept_layout = layout if isinstance(layout, Blocked) else None
    rows.store_scalar(rows.reduce(combiner, value), layout=kept_layout)
    data = torch.randn(image.shape)
    functional = torch.nn.functional
    expected = (
        functional.max_pool2d(data, 3, 2, 1)
        if combiner == "max"
        else functional.avg_pool2d(data, 3, 2, 1, divisor_override=1)
    )
    torch.testing.assert_close(rows.run(data)[0], expected)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("layout", [None, Blocked(16)])
@pytest.mark.parametrize("shape", [(3, 37, 11, 13), (1, 48, 3, 2), (2, 5, 1, 31)])
def test_maxima_of_windows_side_by_side(shape: tuple[int, ...], layout: Layout | None, target: Target) -> None:
    """2x2 windows over several blocks of channels, enough rows of windows for the cores and too few; NaN wins in any place."""
    n, c, out_h, out_w = shape
    rows = Rows((n, c, out_h, out_w, 2, 2), (4, 5))
    image = Buffer((n, c, 2 * out_h, 2 * out_w), "float32", "image")
    rows.input, rows.reads = image, [Argument(image, layout or contiguous(image.shape))]
    i = rows.index
    value = image.at((i[0], i[1], i[2] * 2 + i[4], i[3] * 2 + i[5]))
    rows.store_scalar(rows.reduce("max", value), layout=layout)
    data = torch.randn(image.shape)
    data.view(-1)[::7] = math.nan
    torch.testing.assert_close(rows.run(data, target)[0], torch.nn.functional.max_pool2d(data, 2), equal_nan=True)


@pytest.mark.parametrize("combiner", ["sum", "max"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((17, 37), (0,)), ((23, 3, 19), (0, 1)), ((5, 7, 40), (0, 1)), ((18, 3, 8), (0,))],
)
def test_large_windows_have_several_accumulators(shape: tuple[int, ...], axes: tuple[int, ...], combiner: str) -> None:
    """Rows reduced side by side, in lengths that no number of accumulators divides; a NaN in any accumulator wins."""
    rows = Rows(shape, axes)
    rows.store_scalar(rows.reduce(combiner, rows.x))
    assert "acc" in emitted(rows, HOST)
    x = torch.rand(shape) + 0.5
    for column in range(6):
        x[(column * 7) % shape[0], ..., column] = math.nan
    expected = COMBINERS[combiner](x.double(), axes).float()
    torch.testing.assert_close(rows.run(x)[0], expected, rtol=1e-5, atol=0, equal_nan=True)
