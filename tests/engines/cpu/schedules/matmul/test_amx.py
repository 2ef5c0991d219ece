"""MatMul by AMX: the kernel runs on emulated tiles and is compared with eager in float64, integers exactly."""

from __future__ import annotations

import ctypes
import itertools
import math

import pytest
import torch

from tests.engines.cpu.amx_for_tests import ODD_NUMBERS, emulated
from tests.engines.cpu.schedule_runner import run_kernel, runner_of
from tests.engines.cpu.schedules.amx.products_for_tests import (
    TILES_HOST,
    TILES_NARROW,
    Shape,
    compiled,
    errors,
    kernel_of,
    operands_of,
    run,
)
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, LARGEST, SMALLEST
from torch_hybrid_backend.engines.cpu.operands.packing import pack_tiles
from torch_hybrid_backend.engines.cpu.schedules.matmul.amx import emit
from torch_hybrid_backend.sizes.size import symbol

__all__ = ["emulated"]  # the fixture


def _bound(name: str) -> float:
    """The bound of `errors`."""
    return 2e-5 if FORMATS[name].parts == 2 else 3e-7


# What differs from one of the others in what is multiplied alone.
_LIKE_OTHERS = ("float32 high", "int8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in _LIKE_OTHERS else name for name in FORMATS]
)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 32, 64, 32),  # one panel of each
        (1, 8, 3, 5),  # less than a tile of everything
        (1, 3, 1500, 70),  # few rows
        (2, 70, 100, 130),  # rows, k and columns left over, several batches
        (1, 45, 1100, 33),  # a short panel of rows, k in two parts
    ],
)
def test_matches_eager(emulated: ctypes.CDLL, shape: Shape, name: str) -> None:
    """(batch, m, k, n): float32 within a few roundings of one product, integers exactly; with every core's tiles released."""
    a, b = operands_of(shape, name)
    residual = torch.randint(-5, 5, (shape[0], shape[1], shape[3]))
    kernel = kernel_of(shape, name)
    read_a, packed, read_residual = (argument.buffer for argument in kernel.reads)
    before = emulated.products_so_far()
    inputs = {read_a: a, packed: pack_tiles(b, FORMATS[name])}
    if FORMATS[name].sums == "int32":
        (got,) = run_kernel(kernel, emit, {**inputs, read_residual: residual.int()}, TILES_HOST)
        assert torch.equal(got.long(), a.long() @ b.long() + residual)
    else:
        (got,) = run_kernel(kernel, emit, {**inputs, read_residual: residual.float()}, TILES_HOST)
        want = torch.relu(a.double() @ b.double() + residual)
        scale = a.double().abs() @ b.double().abs() + residual.abs()
        assert ((got.double() - want).abs() <= _bound(name) * scale).all()
    assert emulated.products_so_far() > before


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize(("k", "n"), [(100, 70), (1100, 33)])
def test_rows_known_at_run_time(emulated: ctypes.CDLL, name: str, k: int, n: int) -> None:
    """A kernel serves any number of rows and of batches: none, less than a tile, panels that are whole and not, several tasks."""
    kernel = kernel_of((symbol("b", 1), symbol("m", 40), k, n), name)
    product = runner_of(kernel, emit, TILES_NARROW)
    read_a, packed, read_residual = (argument.buffer for argument in kernel.reads)
    for batch, m in [(1, 40), (1, 1), (2, 16), (1, 17), (3, 32), (1, 0), (0, 5), (1, 600), (2, 290)]:
        a, b = operands_of((batch, m, k, n), name)
        residual = torch.randint(-5, 5, (batch, m, n))
        before = emulated.products_so_far()
        inputs = {read_a: a, packed: pack_tiles(b, FORMATS[name])}
        (got,) = product({**inputs, read_residual: residual.to(getattr(torch, read_residual.dtype))})
        want = a.double() @ b.double() + residual
        if FORMATS[name].sums == "int32":
            assert torch.equal(got.double(), want)
        else:
            scale = a.double().abs() @ b.double().abs() + residual.abs()
            assert ((got.double() - torch.relu(want)).abs() <= _bound(name) * scale).all()
        assert (emulated.products_so_far() > before) == (batch * m > 0)


def test_float32_is_no_less_exact_than_eager(emulated: ctypes.CDLL) -> None:
    """At k = 768 the root mean square error of three parts is below eager's, that of two what "high" allows."""
    shape = (1, 64, 768, 64)
    a, b = operands_of(shape, "float32")

    def rms(got: torch.Tensor) -> float:
        return float(errors(got, a, b).square().mean().sqrt())

    assert rms(run(kernel_of(shape, "float32"), a, b)) < min(1.4e-8, rms(a @ b))
    assert 1e-8 < rms(run(kernel_of(shape, "float32 high"), a, b)) < 5e-7


@pytest.mark.parametrize("name", ["float32", "float32 high"])
def test_numbers_that_cannot_be_split(emulated: ctypes.CDLL, name: str) -> None:
    """A number in A or B that cannot be split leaves its panels as eager's, in any part of k; the others are multiplied on tiles."""
    shape = (1, 40, 1100, 40)
    product = compiled(kernel_of(shape, name))
    a, b = operands_of(shape, name)
    start = emulated.products_so_far()
    product(a, b)
    all_on_tiles = emulated.products_so_far() - start
    numbers = ODD_NUMBERS if name == "float32" else ODD_NUMBERS[:6:5]
    for number, (row, k) in itertools.product(numbers, [(0, 0), (39, 1099), (0, -1)]):
        a, b = operands_of(shape, name)
        if k >= 0:
            a[0, row, k] = number
        else:
            b[0, 700, 35] = number
        start = emulated.products_so_far()
        got = product(a, b)
        assert 0 < emulated.products_so_far() - start < all_on_tiles
        want = a.double() @ b.double()
        # Beyond float32 the order of the sum, eager's as well, decides between an infinity and NaN.
        known = ~(want.isfinite() & (want.abs() > torch.finfo(torch.float32).max))
        assert torch.equal(got.isnan()[known], want.isnan()[known])
        assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
        scale = a.double().abs() @ b.double().abs()
        assert ((got.double() - want).abs() <= _bound(name) * scale)[known & want.isfinite()].all()


def test_small_and_large_operands_throughout(emulated: ctypes.CDLL) -> None:
    """Results are as exact as eager's where no number can be split, denormal numbers included; at the limits tiles are."""
    shape = (1, 33, 50, 20)
    product = compiled(kernel_of(shape, "float32"))
    for size in (1e-20, 1e-37, 1e-42, 1e18):
        a, b = operands_of(shape, "float32")
        a, b = a * size, b / max(size, 1e-30)
        start = emulated.products_so_far()
        got = product(a, b)
        assert emulated.products_so_far() == start
        assert errors(got, a, b).max() <= 2 * errors(a @ b, a, b).max()
    for size in (SMALLEST, LARGEST):
        a, b = (torch.sign(x) * size * (1 + 2**-20) ** (1 if size < 1 else -1) for x in operands_of(shape, "float32"))
        start = emulated.products_so_far()
        got = product(a, b)
        assert emulated.products_so_far() > start
        assert errors(got, a, b).max() < 3e-7


@pytest.mark.parametrize("name", ["float16 split", "float16"])
def test_every_float16(emulated: ctypes.CDLL, name: str) -> None:
    """All finite ones, denormal ones too, come through a product with 1 as they are; what has an infinity or NaN is as in eager."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    a = every[every.isfinite()].reshape(1, 1984, 32)
    product = compiled(kernel_of((1, 1984, 32, 32), name))
    before = emulated.products_so_far()
    assert torch.equal(product(a, torch.eye(32, dtype=torch.float16)[None]), a.float())
    assert emulated.products_so_far() > before
    product = compiled(kernel_of((1, 40, 100, 40), name))
    for number in (math.inf, -math.inf, math.nan):
        a, b = operands_of((1, 40, 100, 40), name)
        a[0, 3, 7], b[0, 70, 35] = number, number
        got, want = product(a, b), a.double() @ b.double()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[want.isinf()].double(), want[want.isinf()])
        finite = want.isfinite()
        assert ((got - want).abs() <= _bound(name) * (a.double().abs() @ b.double().abs()))[finite].all()


@pytest.mark.parametrize("name", ["uint8", "int8"])
def test_long_integer_products(emulated: ctypes.CDLL, name: str) -> None:
    """k of 70,000 with the most extreme values: sums are exact where they fit 32 bits, and modulo 2^32 where they do not."""
    shape = (1, 17, 70_000, 33)
    a, b = operands_of(shape, name)
    a[:, :3], b[:, :, :2] = (255 if name == "uint8" else -128), -128
    a[:, 1, ::2] = 0
    want = a.long() @ b.long()
    got = run(kernel_of(shape, name), a, b)
    assert torch.equal(got, want.to(torch.int32))
    assert (want == got).sum() > want.numel() - 40
    assert (want.abs().max() > 2**31) == (name == "uint8")
