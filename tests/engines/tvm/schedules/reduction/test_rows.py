"""Row kernels against eager: reductions over every axis order, normalisations, pooling, every combiner and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, NARROW, run_kernel
from torch_hybrid_backend.engines.tvm.schedules.reduction import rows
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir.emit import emit_kernel
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, RowKernel, Stage, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided, contiguous


class Rows:
    """A row kernel being put together: `x` is its input over the whole domain."""

    def __init__(self, shape: Sequence[int], axes: Sequence[int], dtype: str = "float32", layout: Layout | None = None):
        self.shape, self.axes = tuple(shape), tuple(axes)
        self.domain = tuple(LoopVar(f"i{d}", n) for d, n in enumerate(shape))
        self.index = tuple(index_of(v) for v in self.domain)
        self.kept = tuple(i for d, i in enumerate(self.index) if d not in axes)
        self.kept_shape = tuple(n for d, n in enumerate(shape) if d not in axes)
        self.input = Buffer(self.shape, dtype, "x")
        self.reads = [Argument(self.input, layout or contiguous(self.shape))]
        self.writes: list[Argument] = []
        self.stages: list[Stage] = []
        self.x: Expr = self.input.at(self.index)

    def reduce(self, combiner: str, value: Expr, dtype: str | None = None) -> Expr:
        local = Buffer(self.kept_shape, dtype or value.dtype)
        self.stages.append(Stage("reduce", local, value, combiner))
        return Load(local.dtype, local, self.kept)

    def scalar(self, value: Expr) -> Expr:
        local = Buffer(self.kept_shape, value.dtype)
        self.stages.append(Stage("scalar", local, value))
        return Load(local.dtype, local, self.kept)

    def map(self, value: Expr) -> Expr:
        local = Buffer(self.shape, value.dtype)
        self.stages.append(Stage("map", local, value))
        return Load(local.dtype, local, self.index)

    def store(self, value: Expr, dtype: str = "float32", layout: Layout | None = None) -> None:
        self._store("store", self.shape, self.index, value, dtype, layout)

    def store_scalar(self, value: Expr, dtype: str = "float32", layout: Layout | None = None) -> None:
        self._store("store_scalar", self.kept_shape, self.kept, value, dtype, layout)

    def _store(
        self,
        kind: str,
        shape: tuple[int, ...],
        index: tuple[Index, ...],
        value: Expr,
        dtype: str,
        layout: Layout | None,
    ) -> None:
        out = Buffer(shape, dtype, "out")
        self.writes.append(Argument(out, layout or contiguous(shape)))
        self.stages.append(Stage(kind, None, value, store=Store(out, index, value)))

    def run(self, x: torch.Tensor, target: Target = HOST) -> list[torch.Tensor]:
        kernel = RowKernel(
            tuple(self.reads), tuple(self.writes), self.domain, axes=self.axes, stages=tuple(self.stages)
        )
        return run_kernel(kernel, rows.emit, {self.input: x}, target)


def emitted(rows: Rows, target: Target) -> str:
    """The kernel as TIR text."""
    kernel = RowKernel(tuple(rows.reads), tuple(rows.writes), rows.domain, axes=rows.axes, stages=tuple(rows.stages))
    return str(emit_kernel(kernel, "kernel", target))


def number(value: float) -> Expr:
    return ops.const(value, "float32")


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


def product(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis)
    return x


COMBINERS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "prod": product,
    "max": torch.amax,
    "min": torch.amin,
}


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
