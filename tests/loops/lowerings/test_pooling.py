"""Pooling and resampling against eager."""

from __future__ import annotations

import math

import pytest
import torch

from loops.check import FLOATS, check, sample
from torch_hybrid_backend.loops.policy import Abilities

aten = torch.ops.aten

# kernel, stride, padding, dilation, ceil_mode
MAX_CASES = {
    "plain": ([2, 2], [], [0], [1], False),
    "resnet": ([3, 3], [2, 2], [1, 1], [1, 1], False),
    "dilated": ([2, 3], [1, 2], [1, 1], [2, 2], False),
    "ceil": ([3, 3], [2, 2], [0, 0], [1, 1], True),
    "ceil padded": ([2, 3], [2], [1], [1], True),
}


@pytest.mark.parametrize("name", MAX_CASES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_max_pool(name: str, dtype: torch.dtype) -> None:
    """Maxima and their positions; padding never wins."""
    x = sample(2, 3, 8, 9, dtype=dtype, low=-50, high=-1)
    check(lambda a: aten.max_pool2d_with_indices.default(a, *MAX_CASES[name]), x)
    check(lambda a: aten.max_pool2d_with_indices.default(a, *MAX_CASES[name])[0], x[0])


def test_max_pool_of_special_values() -> None:
    """NaN wins; a window of -inf gives -inf and a position inside the image."""
    x = sample(1, 1, 6, 6)
    x[0, 0, 2, 3] = math.nan
    x[0, 0, :2, :2] = -math.inf
    check(lambda a: aten.max_pool2d_with_indices.default(a, [2, 2], [2, 2]), x)
    check(
        lambda a: aten.max_pool2d_with_indices.default(a, [3, 3], [2, 2], [1, 1]), torch.full((1, 1, 5, 5), -math.inf)
    )


def test_max_pool_3d() -> None:
    """Three spatial dimensions."""
    check(lambda a: aten.max_pool3d_with_indices.default(a, [2, 3, 2], [1, 2, 2], [1, 1, 0]), sample(1, 2, 4, 5, 6))


# kernel, stride, padding, ceil_mode, count_include_pad, divisor
AVERAGE_CASES = {
    "plain": ([2, 2], [], [0], False, True, None),
    "padded": ([3, 3], [2, 2], [1, 1], False, True, None),
    "padding not counted": ([3, 3], [2, 2], [1, 1], False, False, None),
    "ceil": ([3, 2], [2, 3], [1, 1], True, True, None),
    "ceil, not counted": ([3, 2], [2, 3], [1, 1], True, False, None),
    "divisor": ([3, 2], [2, 2], [1, 0], True, True, 5),
}


@pytest.mark.parametrize("name", AVERAGE_CASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_average_pool(name: str, dtype: torch.dtype) -> None:
    """Every rule of what a window is divided by."""
    x = sample(2, 3, 8, 9, dtype=dtype)
    check(lambda a: aten.avg_pool2d.default(a, *AVERAGE_CASES[name]), x)
    check(lambda a: aten.avg_pool2d.default(a, *AVERAGE_CASES[name]), x[0])


def test_average_pool_larger_than_the_image() -> None:
    """A kernel far larger than the image costs no more than the image (ceil_mode lets it stick out)."""
    x = sample(2, 3, 4, 5)
    check(lambda a: aten.avg_pool2d.default(a, [2000, 2000], [], [0], True), x)
    check(lambda a: aten.avg_pool2d.default(a, [6, 7], [2, 3], [2, 1], True, False), x)
    check(lambda a: aten.avg_pool2d.default(a, [6, 7], [2, 3], [2, 1], False, True), x)


def test_average_pool_of_other_ranks() -> None:
    """Average pooling in one and three spatial dimensions."""
    check(lambda a: aten.avg_pool1d.default(a, [3], [2], [1], True, False), sample(2, 3, 8))
    check(lambda a: aten.avg_pool3d.default(a, [2, 3, 2], [2], [1], False, False), sample(1, 2, 4, 5, 6))


@pytest.mark.parametrize("size", [[1, 1], [2, 3], [3, 5], [7, 8], [9, 4]])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adaptive_pool(size: list[int], dtype: torch.dtype) -> None:
    """Windows of equal and of different sizes, fewer or more than pixels."""
    x = sample(2, 3, 6, 8, dtype=dtype)
    check(lambda a: aten._adaptive_avg_pool2d.default(a, size), x)
    check(lambda a: aten.adaptive_max_pool2d.default(a, size)[0], x)


def test_adaptive_pool_of_other_ranks() -> None:
    """Adaptive pooling in one and three spatial dimensions."""
    check(lambda a: aten._adaptive_avg_pool3d.default(a, [2, 3, 1]), sample(1, 2, 5, 6, 4))
    check(lambda a: aten._adaptive_avg_pool2d.default(a, [1, 3]), sample(2, 5, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [[10, 14], [5, 7], [3, 9], [15, 2], [41, 13]])
def test_nearest(dtype: torch.dtype, size: list[int]) -> None:
    """Nearest neighbours at any ratio, also those that float32 rounds."""
    x = sample(1, 2, 5, 7, dtype=dtype, high=100)
    check(lambda a: aten.upsample_nearest2d.default(a, size), x)
    check(lambda a: aten.upsample_nearest2d.vec(a, size, None), x)
    check(lambda a: aten._upsample_nearest_exact2d.default(a, size), x)


@pytest.mark.parametrize("scale", [2.0, 1.5, 0.7, 2.3])
def test_resampling_by_scale(scale: float) -> None:
    """A given scale is used as it is, not recomputed from the sizes."""
    x = sample(1, 2, 5, 7)
    check(lambda a: aten.upsample_nearest2d.vec(a, None, [scale, scale]), x)
    check(lambda a: aten.upsample_bilinear2d.vec(a, None, False, [scale, scale]), x)
    check(lambda a: aten.upsample_bilinear2d.vec(a, None, True, [scale, scale]), x)
    check(lambda a: aten._upsample_nearest_exact2d.vec(a, None, [scale, scale]), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("size", [[10, 14], [5, 7], [3, 9], [1, 1]])
def test_bilinear(dtype: torch.dtype, align: bool, size: list[int]) -> None:
    """Bilinear interpolation up and down, corners aligned or not."""
    check(lambda a: aten.upsample_bilinear2d.default(a, size, align), sample(1, 2, 5, 7, dtype=dtype))
    check(lambda a: aten.upsample_bilinear2d.default(a, size, align), sample(1, 2, 1, 7, dtype=dtype))


def test_resampling_of_other_ranks() -> None:
    """Resampling in one and three spatial dimensions."""
    check(lambda a: aten.upsample_nearest1d.default(a, [11]), sample(1, 2, 5))
    check(lambda a: aten.upsample_linear1d.default(a, [11], False), sample(1, 2, 5))
    check(lambda a: aten.upsample_nearest3d.default(a, [4, 5, 6]), sample(1, 2, 2, 3, 4))
    check(lambda a: aten.upsample_trilinear3d.default(a, [4, 5, 6], True), sample(1, 2, 2, 3, 4))


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bicubic(dtype: torch.dtype, align: bool) -> None:
    """Bicubic resampling reads 16 neighbours, for kernels that read so many; up, down and by scales."""
    abilities = Abilities(max_taps=16)
    x = sample(1, 2, 5, 7, dtype=dtype)
    for size in ([9, 4], [5, 15], [1, 1]):
        check(lambda a: aten.upsample_bicubic2d.default(a, size, align), x, abilities=abilities)  # noqa: B023
    check(lambda a: aten.upsample_bicubic2d.vec(a, None, align, [1.7, 0.6]), x, abilities=abilities)


@pytest.mark.parametrize("size", [(3, 2), (1, 1), (4, 9)])
def test_positions_of_adaptive_maxima(size: tuple[int, int]) -> None:
    """In the flattened image, of windows that may overlap."""
    abilities = Abilities(scatters="any")
    check(lambda a: aten.adaptive_max_pool2d.default(a, size), sample(2, 3, 8, 9), abilities=abilities)
    check(lambda a: aten.adaptive_max_pool3d.default(a, (2, *size)), sample(2, 3, 8, 9), abilities=abilities)
