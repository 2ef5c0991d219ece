"""Gradients of resampling, adaptive pooling and padding against eager, for kernels that combine in place."""

from __future__ import annotations

import pytest
import torch

from loops.check import check, sample
from torch_hybrid_backend.loops.policy import Abilities

aten = torch.ops.aten
ANY = Abilities(scatters="any", max_taps=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_nearest(dtype: torch.dtype) -> None:
    """Up and down, by sizes and by scales."""
    for size in ([6, 10], [7, 3]):
        grad = sample(1, 2, *size, dtype=dtype)
        for operator in (aten.upsample_nearest2d_backward.default, aten._upsample_nearest_exact2d_backward.default):
            check(lambda g: operator(g, size, [1, 2, 3, 5]), grad, abilities=ANY)  # noqa: B023
    check(lambda g: aten.upsample_nearest1d_backward.default(g, [7], [1, 2, 5], 1.4), sample(1, 2, 7), abilities=ANY)
    check(
        lambda g: aten.upsample_nearest3d_backward.default(g, [2, 4, 6], [1, 2, 1, 2, 3]),
        sample(1, 2, 2, 4, 6),
        abilities=ANY,
    )


@pytest.mark.parametrize("align", [True, False])
def test_interpolations(align: bool) -> None:
    """Each pixel's gradient is shared among those that it was blended of."""
    grad = sample(1, 2, 6, 9)
    check(lambda g: aten.upsample_linear1d_backward.default(g[0], [9], [2, 6, 4], align), grad, abilities=ANY)
    check(lambda g: aten.upsample_bilinear2d_backward.default(g, [6, 9], [1, 2, 3, 4], align), grad, abilities=ANY)
    check(lambda g: aten.upsample_bilinear2d_backward.default(g, [6, 9], [1, 2, 6, 1], align), grad, abilities=ANY)
    check(lambda g: aten.upsample_bicubic2d_backward.default(g, [6, 9], [1, 2, 3, 4], align), grad, abilities=ANY)
    volume = sample(1, 1, 4, 3, 5)
    check(
        lambda g: aten.upsample_trilinear3d_backward.default(g, [4, 3, 5], [1, 1, 2, 3, 2], align),
        volume,
        abilities=ANY,
    )


@pytest.mark.parametrize("size", [(3, 4), (1, 1), (2, 7)])
def test_adaptive_pooling(size: tuple[int, int]) -> None:
    """Windows of one size and of several, which may overlap."""
    x, grad = sample(2, 3, 6, 8), sample(2, 3, *size)
    check(aten._adaptive_avg_pool2d_backward.default, grad, x, abilities=ANY)
    positions = aten.adaptive_max_pool2d.default(x, size)[1]
    check(aten.adaptive_max_pool2d_backward.default, grad, x, positions, abilities=ANY)


def test_replication() -> None:
    """The edges receive what was copied from them."""
    x = sample(1, 2, 4, 5)
    check(
        lambda g, x: aten.replication_pad2d_backward.default(g, x, [1, 2, 3, 0]), sample(1, 2, 7, 8), x, abilities=ANY
    )
