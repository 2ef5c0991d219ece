"""Row kernels against eager: normalisations and pooling over every axis order."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW
from tests.engines.cpu.schedules.reduction.rows_for_tests import Rows, number
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Stage, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, contiguous

SHAPES = [
    ((7, 13), (1,)),
    ((7, 13), (0,)),
    ((5, 1000), (1,)),
    ((1000, 5), (0,)),
    ((3, 1, 33), (2,)),
    ((3, 17, 33), (1,)),
    ((3, 17, 33), (0, 2)),
    ((4, 6, 5, 7), (2, 3)),
    ((4, 6, 5, 7), (0, 2, 3)),
    ((11,), (0,)),
    ((2, 3), (0, 1)),
    ((64, 257), (1,)),
]


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_softmax(shape: tuple[int, ...], axes: tuple[int, ...], target: Target) -> None:
    """Softmax over any axes: a maximum, a row of exponentials, their sum, the quotient."""
    rows = Rows(shape, axes)
    top = rows.reduce("max", rows.x)
    e = rows.map(ops.call("exp", ops.sub(rows.x, top)))
    total = rows.reduce("sum", e)
    rows.store(ops.div(e, total))
    x = torch.randn(shape) * 5
    flat = x - x.amax(axes, keepdim=True)
    torch.testing.assert_close(rows.run(x, target)[0], flat.exp() / flat.exp().sum(axes, keepdim=True))


@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_layer_norm_without_row_buffers(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Mean and variance by two reductions, scalars once a row, mean and reciprocal deviation stored beside the result."""
    rows = Rows(shape, axes)
    count = math.prod(shape[a] for a in axes)
    mean = rows.scalar(ops.mul(rows.reduce("sum", rows.x), number(1 / count)))
    centred = ops.sub(rows.x, mean)
    variance = rows.scalar(ops.mul(rows.reduce("sum", ops.mul(centred, centred)), number(1 / count)))
    rstd = rows.scalar(ops.call("rsqrt", ops.add(variance, number(1e-5))))
    rows.store(ops.mul(centred, rstd))
    rows.store_scalar(mean)
    rows.store_scalar(rstd)
    x = torch.randn(shape) + 3
    out, got_mean, got_rstd = rows.run(x)
    variance_, mean_ = torch.var_mean(x, axes, correction=0, keepdim=True)
    expected = (variance_ + 1e-5).rsqrt()
    torch.testing.assert_close(out, (x - mean_) * expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_mean, mean_.squeeze(axes))
    torch.testing.assert_close(got_rstd, expected.squeeze(axes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [None, Blocked(16), Blocked(8)])
def test_global_average_pooling(layout: Layout | None) -> None:
    """The mean over pixels, read from a blocked layout, written plainly."""
    rows = Rows((3, 37, 7, 9), (2, 3), layout=layout)
    rows.store_scalar(ops.mul(rows.reduce("sum", rows.x), number(1 / 63)))
    x = torch.randn(3, 37, 7, 9)
    torch.testing.assert_close(rows.run(x)[0], x.mean((2, 3)))


@pytest.mark.parametrize("layout", [None, Blocked(16), Blocked(8)])
def test_group_norm(layout: Layout | None) -> None:
    """Groups of channels as a domain of their own; a blocked layout puts several groups into one block."""
    n, groups, per, h, w = 2, 6, 4, 3, 5
    channels = groups * per
    rows = Rows((n, groups, per, h, w), (2, 3, 4))
    image = Buffer((n, channels, h, w), "float32", "image")
    rows.input, rows.reads = image, [Argument(image, layout or contiguous(image.shape))]
    i = rows.index
    place = (i[0], i[1] * per + i[2], i[3], i[4])
    element = image.at(place)
    count = per * h * w
    mean = rows.scalar(ops.mul(rows.reduce("sum", element), number(1 / count)))
    centred = ops.sub(element, mean)
    squares = rows.reduce("sum", ops.mul(centred, centred))
    rstd = rows.scalar(ops.call("rsqrt", ops.add(ops.mul(squares, number(1 / count)), number(1e-5))))
    out = Buffer(image.shape, "float32", "out")
    rows.writes.append(Argument(out, layout or contiguous(out.shape)))
    value = ops.mul(centred, rstd)
    rows.stages.append(Stage("store", None, value, store=Store(out, place, value)))
    x = torch.randn(image.shape)
    torch.testing.assert_close(rows.run(x)[0], torch.nn.functional.group_norm(x, groups), rtol=1e-4, atol=1e-5)
