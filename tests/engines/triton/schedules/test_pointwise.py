"""Pointwise programs: any strides, any sizes, transpositions in squares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import HOPPER, check, compiled
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.loops.kernels import MapKernel

pytest.importorskip("triton")


@pytest.mark.parametrize("shape", [(1,), (7,), (128, 8), (3, 5, 7), (2, 1, 130), (40, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    x = (10 * torch.randn(shape)).to(dtype)
    check(tmp_path, lambda x: x * 3 + x, x, kinds=(MapKernel,))


def test_broadcasts_and_strides(tmp_path: Path) -> None:
    """Rows and columns broadcast; slices, and what is expanded, are read where they lie."""
    x, row = torch.randn(33, 70)[:, ::2], torch.randn(35)
    column = torch.randn(33, 1).expand(33, 35)
    check(tmp_path, lambda x, row, column: (x + row) * column, x, row, column)


@pytest.mark.parametrize("shape", [(64, 96), (33, 65), (2, 40, 50), (1, 64, 96)])
def test_a_transposition_has_squares(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A tile of two dimensions, so that reading and writing go through whole cache lines."""
    x = torch.randn(shape)
    transpose = lambda x: (x.transpose(-1, -2) + 1).contiguous()  # noqa: E731
    check(tmp_path, transpose, x)
    region, _ = compiled(tmp_path, transpose, x)
    (kernel,) = region.kernels.kernels
    assert set(emit_kernel(kernel, "kernel", HOPPER).launch.constants) == {"ROWS", "COLUMNS"}


def test_what_lies_in_another_order_is_written_in_its_order(tmp_path: Path) -> None:
    """channels_last in, channels_last out."""
    x = torch.randn(2, 16, 9, 9).to(memory_format=torch.channels_last)
    check(tmp_path, lambda x: x.relu() * 2, x)


def test_guards_and_gathers(tmp_path: Path) -> None:
    """Padding reads nothing outside the tensor; an index is read from memory."""
    x, index = torch.randn(5, 6), torch.tensor([4, 0, 2])
    check(tmp_path, lambda x: torch.nn.functional.pad(x, (2, 1, 1, 3), value=0.5), x)
    check(tmp_path, lambda x, i: torch.nn.functional.embedding(i, x) + 1, x, index)
