"""Winograd's matrices and packing; its kernels are tested with the other convolutions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from torch_hybrid_backend.engines.cpu.operands.packing import pack_winograd_weight
from torch_hybrid_backend.engines.cpu.operands.winograd_transform import (
    POINTS,
    even_polynomial,
    packed_winograd_shape,
    weight_matrix,
)


def points(m: int) -> list[Fraction]:
    """The finite points, in the order of the rows."""
    return [Fraction(0), *(sign * p for p in POINTS[m] for sign in (1, -1))]


@pytest.mark.parametrize("m", sorted(POINTS))
def test_the_weight_matrix_is_exact(m: int) -> None:
    """Row i of G is the kernel's polynomial at point i, divided by the product of the distances to the other points; the last is the leading
    coefficient."""
    for i, (row, p) in enumerate(zip(weight_matrix(m), points(m), strict=False)):
        scale = Fraction(1)
        for j, q in enumerate(points(m)):
            scale *= p - q if i != j else 1
        assert row == tuple(p**k / scale for k in range(3))
    assert weight_matrix(m)[-1] == (Fraction(0), Fraction(0), Fraction(1))
    assert len(weight_matrix(m)) == m + 2


def test_even_polynomials_have_their_roots() -> None:
    """The product of (x^2 - s) vanishes where x^2 is one of the s, and is monic."""
    squares = [Fraction(1, 4), Fraction(9)]
    coefficients = even_polynomial(squares)
    assert coefficients[-1] == 1
    for s in squares:
        assert sum(c * s**k for k, c in enumerate(coefficients)) == 0


@pytest.mark.parametrize("m", sorted(POINTS))
def test_packed_weights_are_padded_with_zeros(m: int) -> None:
    """Output channels beyond the last are zero; the sum over the infinite point is the kernel's last tap; the signs of all taps are behind."""
    w = torch.randn(5, 3, 3, 3)
    packed = pack_winograd_weight(w, m, 4)
    assert packed.shape == packed_winograd_shape((5, 3, 3, 3), m, 4) == (1, (m + 2) ** 2 + 1, 3, 8)
    assert (packed[..., 5:] == 0).all()
    torch.testing.assert_close(packed[0, -2, :, :5], w[:, :, 2, 2].T)
    for tap in range(9):
        signs = (packed[0, -1, :, :5].int() >> 2 * tap & 3) - 1
        assert torch.equal(signs.T.float(), w.flatten(2)[:, :, tap].sign())
    grouped = pack_winograd_weight(torch.cat([w, 2 * w]), m, 4, groups=2)
    assert torch.equal(
        grouped,
        torch.cat([packed, packed * torch.where(torch.arange((m + 2) ** 2 + 1) < (m + 2) ** 2, 2, 1)[:, None, None]]),
    )
