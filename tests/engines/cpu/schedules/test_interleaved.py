"""Few channels from planes into blocked channels, and rows of matrices into words, against what is computed one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engines.cpu.schedule_runner import compile_kernel, run_kernel
from tests.engines.cpu.schedules.test_elementwise import kernel_of, random, tensor
from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.operands.vnni_packing import pack_right, packed_right_value
from torch_hybrid_backend.engines.cpu.schedules import elementwise
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.loops.kernels import Argument, MapKernel
from torch_hybrid_backend.loops.layout import Blocked

_WIDE = Target("skylake-avx512", "x", ("avx512f", "avx512bw"), 16, 2, 32 << 10, 1 << 20)


def scaled(shape: tuple[int, ...], source: str, dtype: str) -> MapKernel:
    """Twice an image, as another dtype, in blocks of its channels."""
    x = tensor(shape, source)

    def value(index: tuple[Index, ...]) -> Expr:
        return ops.mul(ops.cast(x.buffer.at(index), "float32"), ops.const(2.0, "float32"))

    block = 1 << (shape[1] - 1).bit_length()
    return kernel_of(shape, [x], [(dtype, Blocked(block), value)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (1, 4, 3, 37), (3, 2, 33), (1, 3, 1, 64), (2, 3, 4, 9)])
def test_matches_eager(shape: tuple[int, ...], dtype: str) -> None:
    """Whole vectors of pixels, some left, rows that are too short; two, three and four channels."""
    kernel = scaled(shape, "float32", dtype)
    x = random(shape, "float32")
    (got,) = run_kernel(kernel, elementwise.emit, {kernel.reads[0].buffer: x})
    assert torch.equal(got.to(getattr(torch, dtype)), (x * 2).to(getattr(torch, dtype)))


def test_margins() -> None:
    """A border of a number is a piece of its own."""
    x = tensor((1, 3, 6, 40), "uint8")

    def value(index: tuple[Index, ...]) -> Expr:
        inner = (*index[:3], index[3] - 2)
        inside = ops.index_in(inner[3], 0, 40)
        return ops.guard(inside, x.buffer.at(inner), ops.const(9, "uint8"))

    kernel = kernel_of((1, 3, 6, 45), [x], [("uint8", Blocked(4), value)])
    image = random((1, 3, 6, 40), "uint8")
    (got,) = run_kernel(kernel, elementwise.emit, {x.buffer: image})
    assert torch.equal(got, torch.nn.functional.pad(image, (2, 3), value=9))


BYTES = DotProduct("vpdpbusd", 4, "uint8", "int8", "int32")
HALVES = DotProduct("vdpbf16ps", 2, "bfloat16", "bfloat16", "float32")


def in_words(shape: tuple[int, ...], dot: DotProduct, tile: int) -> tuple[MapKernel, Argument]:
    """A right operand (B, K, N) put into words, and the operand."""
    b = tensor(shape, dot.right)
    packed = packed_right_value(b.buffer, tile, dot)
    return kernel_of(packed.shape, [b], [(dot.right, None, packed.at)]), b


@pytest.mark.parametrize("dot", [BYTES, HALVES])
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("shape", [(3, 64, 96), (2, 8, 50), (1, 37, 33), (2, 5, 32), (1, 64, 7)])
def test_rows_of_a_matrix_in_words(shape: tuple[int, ...], tile: int, dot: DotProduct) -> None:
    """Rows and columns that fill words and panels, and such that do not: zeros lie behind them."""
    kernel, b = in_words(shape, dot, tile)
    matrix = random(shape, dot.right)
    (got,) = run_kernel(kernel, elementwise.emit, {b.buffer: matrix})
    assert torch.equal(got, pack_right(matrix, tile, dot))


@pytest.mark.parametrize("columns", [64, 50])
def test_words_are_put_together_by_shuffles(columns: int) -> None:
    """Also where the last panel is not full."""
    kernel, _ = in_words((4, 64, columns), HALVES, 32)
    assembly = compile_kernel(kernel, elementwise.emit, _WIDE).inspect_source("asm")
    assert any(shuffle in assembly for shuffle in ("vpermw", "vpermt2w", "vpermi2w", "vpunpcklwd"))


def test_pixels_are_put_together_by_shuffles() -> None:
    """Vectors of a plane are read and vectors of pixels are written, where there are vectors of 16."""
    kernel = scaled((1, 3, 8, 64), "float32", "float32")
    assembly = compile_kernel(kernel, elementwise.emit, _WIDE).inspect_source("asm")
    assert "vpermt2ps" in assembly or "vpermi2ps" in assembly or "vpermt2pd" in assembly
    narrow = dataclasses.replace(_WIDE, mcpu="haswell", features=(), lanes=8)
    assert "vpermt2" not in compile_kernel(kernel, elementwise.emit, narrow).inspect_source("asm")
