"""Winograd convolution F(m x m, 3x3): its matrices.

A tile of m x m outputs of a 3x3 kernel with stride 1 takes (m + 2)^2 multiplications per pair of channels instead of 9 m^2: 2.25 times
fewer for m = 2, 4 times fewer for m = 4. With `d` an (m + 2) x (m + 2) tile of the input and `g` the kernel,

    tile of the output = A^T [(G g G^T) * (B^T d B), summed over input channels] A

The matrices follow from polynomials evaluated at 0, +-p1, .. and infinity (Toom-Cook). Rounding grows with m: the root mean square error
of float32 against float64, relative to that of the result, is 2e-7 summed directly, 3e-7 for m = 2 and 1e-6 for m = 4 (128 channels).
The points for m = 4 are +-5/8 and +-3/2: the usual +-1 and +-2 more than double the error (2e-6).

Sources: Winograd, "Arithmetic Complexity of Computations", 1980; Lavin & Gray, "Fast Algorithms for Convolutional Neural Networks",
CVPR 2016; Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd Convolution for DNNs", ACM TOMS 2020.

Nothing here imports TVM or torch: the kernel compiler has none; `packing` transforms the weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

# Outputs along one side of a tile -> the positive points p; each stands for p and -p, besides 0 and infinity.
POINTS: dict[int, tuple[Fraction, ...]] = {2: (Fraction(1),), 4: (Fraction(5, 8), Fraction(3, 2))}


def tile_size(m: int) -> int:
    """Inputs along one side of a tile that makes m outputs."""
    return m + 2


def even_polynomial(squares: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients c of the product of (x^2 - s) over `squares`: sum of c[k] x^(2k)."""
    coefficients = [Fraction(1)]
    for s in squares:
        coefficients = [
            (coefficients[k - 1] if k else Fraction(0)) - (s * coefficients[k] if k < len(coefficients) else 0)
            for k in range(len(coefficients) + 1)
        ]
    return coefficients


@functools.cache
def weight_matrix(m: int) -> tuple[tuple[Fraction, ...], ...]:
    """G, (m + 2) x 3; rows in the order of points 0, p1, -p1, .., infinity."""
    points = POINTS[m]
    rows = [(1 / math.prod((-p * p for p in points), start=Fraction(1)), Fraction(0), Fraction(0))]
    for p in points:
        rest = math.prod((p * p - q * q for q in points if q != p), start=Fraction(1))
        scale = 1 / (2 * p * p * rest)  # p (p + p) rest, and the same for -p
        rows += [(scale, scale * p, scale * p * p), (scale, -scale * p, scale * p * p)]
    rows.append((Fraction(0), Fraction(0), Fraction(1)))
    return tuple(rows)


def output_blocks(outputs: int, lanes: int) -> int:
    """Vectors of output channels that a register tile works on together: two, where there are as many."""
    return min(2, -(-outputs // lanes))


def packed_winograd_shape(
    weight_shape: tuple[int, ...], m: int, lanes: int, groups: int = 1
) -> tuple[int, int, int, int]:
    """(parts, (m + 2)^2 + 1, I / groups, vectors * lanes) for a weight (O, I / groups, 3, 3): parts of `output_blocks` vectors of output
    channels, group by group. The last of a part are the signs of its taps."""
    outputs, inputs, _, _ = weight_shape
    per_group = outputs // groups
    width = lanes * output_blocks(per_group, lanes)
    return groups * -(-per_group // width), tile_size(m) ** 2 + 1, inputs, width
