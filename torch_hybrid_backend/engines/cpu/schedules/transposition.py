"""Transposition of a square of float32 vectors in registers.

`lanes` vectors of `lanes` elements take `lanes / 2 * log2(lanes)` pairs of two-source permutations that x86 has as one instruction each
(vunpcklps, vunpckhpd, vshuff32x4), with no index registers: 64 for 16 lanes, 24 for 8.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import TirExpr

# Elements of the 128-bit pieces within which the cheap permutations move.
_PIECE = 4


def transposed(rows: Sequence[TirExpr]) -> list[TirExpr]:
    """Vector j of the result is element j of every row; as many rows as lanes, a multiple of 4. Rows are variables."""
    lanes = len(rows)
    groups = [_within_pieces(rows[i : i + _PIECE], lanes) for i in range(0, lanes, _PIECE)]
    found: list[TirExpr] = [None] * lanes
    for column in range(_PIECE):
        # Piece q of group g: element 4 q + column of rows 4 g .. 4 g + 3.
        for piece, vector in enumerate(_of_pieces([group[column] for group in groups], lanes)):
            found[piece * _PIECE + column] = vector
    return found


def _within_pieces(rows: Sequence[TirExpr], lanes: int) -> list[TirExpr]:
    """Four rows -> four vectors, each piece of them transposed: vector c has element c of each piece of the four rows."""
    starts = range(0, lanes, _PIECE)

    def mixed(a: TirExpr, b: TirExpr, places: Sequence[tuple[int, int]]) -> TirExpr:
        return tir.shuffle([a, b], [start + place + side * lanes for start in starts for side, place in places])

    low, high = ((0, 0), (1, 0), (0, 1), (1, 1)), ((0, 2), (1, 2), (0, 3), (1, 3))
    first, second = ((0, 0), (0, 1), (1, 0), (1, 1)), ((0, 2), (0, 3), (1, 2), (1, 3))
    a, b, c, d = rows
    ab_low, ab_high, cd_low, cd_high = mixed(a, b, low), mixed(a, b, high), mixed(c, d, low), mixed(c, d, high)
    return [
        mixed(ab_low, cd_low, first),
        mixed(ab_low, cd_low, second),
        mixed(ab_high, cd_high, first),
        mixed(ab_high, cd_high, second),
    ]


def _of_pieces(vectors: Sequence[TirExpr], lanes: int) -> list[TirExpr]:
    """The square of pieces transposed: piece g of vector q of the result is piece q of vector g."""
    if len(vectors) == 1:
        return list(vectors)

    def every_second(a: TirExpr, b: TirExpr, first: int) -> TirExpr:
        starts = [s for s in range(0, 2 * lanes, _PIECE) if s // _PIECE % 2 == first]
        return tir.shuffle([a, b], [start + i for start in starts for i in range(_PIECE)])

    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    even = _of_pieces([every_second(a, b, 0) for a, b in pairs], lanes)
    odd = _of_pieces([every_second(a, b, 1) for a, b in pairs], lanes)
    return [vector for both in zip(even, odd, strict=True) for vector in both]
