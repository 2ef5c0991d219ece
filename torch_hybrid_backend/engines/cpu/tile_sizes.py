"""Tile sizes: arithmetic on shapes and the target alone, so that packing can be decided before any kernel exists.

Nothing here imports TVM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.sizes.size import Dim, Size, size_hint

NIBBLES = 8  # in a word of 32 bits


def nibble_place(j: int) -> int:
    """The nibble of a word that holds the word's j-th integer: the lower halves of four bytes come first, then the upper ones.

    One mask so gives four neighbours as bytes, which is what dot products of bytes take.
    """
    return j % 4 * 2 + j // 4


# Taller register tiles gain nothing: the vectors' own loads are already 1/14 of the work.
MAX_ROWS = 14


def max_rows(vectors: int, target: Target, spare: int = 0, *, by_element: bool = False) -> int:
    """The tallest tile whose accumulators leave registers for one row of vectors, one broadcast scalar and `spare` more.

    by_element: each row has a register instead, with its elements of several steps.
    """
    if by_element:
        return max(1, min(MAX_ROWS, (target.isa.registers - 1 - spare - vectors) // (vectors + 1)))
    spare += target.isa.loaded_ahead
    return max(1, min(MAX_ROWS, (target.isa.registers - 1 - spare - vectors) // vectors))


def most_pairs(vectors: int, cached_rows: int, target: Target) -> int:
    """The most pairs of rows in a tile of blocks of 2 x 2 (`dot_products`): blocks for each of `vectors` pairs of columns, the pair itself, and
    three registers for pairs of columns. `cached_rows`: rows that find a place in the first-level cache."""
    return max(1, min(MAX_ROWS // 2, cached_rows // 2, (target.isa.registers - 3) // (vectors + 1)))


def reads_unpacked(m: Dim, k: Dim, n: Dim, target: Target) -> bool:
    """True if a constant (N, K) weight is read as fast where it lies as from packed panels, by a product of m rows.

    One row is as fast as the weight comes from memory, either way. A product of many pads the rows to whole vectors: where that adds a
    thirtieth it is slower, and so it is below four vectors of them. Each core packs all of them, 0.3 cycles an element, for its share of
    the columns, half a cycle a vector of them: 2.5 % for 384 columns a core with 16 lanes.
    """
    if not (isinstance(m, int) and isinstance(k, int) and isinstance(n, int)) or not target.isa.reads_unpacked:
        return False
    if m == 1:
        return k >= 4 * target.lanes and n >= 4 * target.lanes * target.cores
    padded = -(-m // target.lanes) * target.lanes
    return (
        m >= 4 * target.lanes
        and padded * 30 <= m * 31
        and k >= 4 * target.lanes
        and n >= 24 * target.lanes * target.cores
    )


def copies_panels(m: Dim, k: Dim, n: Dim, target: Target) -> bool:
    """True if a constant (K, N) weight is read where it lies by a product of m rows, which copies it panel by panel on its way.

    A copy is four instructions a vector (asked for ahead, addressed, read, written) against m multiply-adds: 3 % at 128 rows, some of it
    beside them. Panels must be whole, and each core needs a dozen, for they are what is shared among cores.
    """
    if not (isinstance(m, int) and isinstance(k, int) and isinstance(n, int)) or not target.isa.copies_panels:
        return False
    panels, left = divmod(n, tile_n(n, target))
    waves = -(-panels // target.cores)
    return m >= 4 * target.lanes and k >= 4 * target.lanes and not left and waves >= 12


def tile_n(n: Dim, target: Target, rows: int = 1) -> int:
    """Columns of a packed matmul panel: two vectors for each of the `rows` rows of a vector of sums, or fewer where `n` is small.

    Two vectors by 14 rows (AVX-512; 6 on AVX2) need 0.57 loads per multiply-add of the two the core can do, and a narrow panel of long K
    still fits the second-level cache. Below one vector: the next power of two. As many where `n` is only known at run time. With pairs of rows
    there are twice or three times as many columns, for which a pair is put together once: three times where that pads few columns.
    """
    if rows > 1 and isinstance(n, int) and n > 4 * target.lanes and -n % (6 * target.lanes) * 16 <= n:
        return 6 * target.lanes
    if isinstance(n, Size) or n > rows * target.lanes:
        return 2 * rows * target.lanes
    return 1 << (n - 1).bit_length()


def strips(images: Dim, rows: int, target: Target) -> int:
    """Strips into which the rows of an image are cut, where a parallel loop goes over (image, strip): the fewest that keep all cores busy."""
    return min(rows, target.cores // math.gcd(size_hint(images), target.cores))


def output_block(o: int, groups: int, target: Target) -> int:
    """Output channels per block of a convolution (and of a blocked activation, with `groups` 1).

    Whole vectors wherever a group has that many channels, padding the last block; otherwise the next power of two. A block never straddles
    groups: with several groups it divides the channels of one (except depthwise, where channels are independent).
    """
    if groups > 1 and groups != o:
        per_group, block = o // groups, target.lanes
        while per_group % block:
            block //= 2
        return block
    return min(target.lanes, 1 << (o - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Split:
    """`total` cut into `parts` parts as equal as can be: the first `large` have `size` elements, the others `size - 1`."""

    parts: int
    size: int
    large: int

    def runs(self) -> list[tuple[int, int, int]]:
        """(first part, number of parts, elements in each) of the runs of equal parts."""
        runs = [(0, self.large, self.size), (self.large, self.parts - self.large, self.size - 1)]
        return [run for run in runs if run[1]]

    def start(self, part: int) -> int:
        """The first element of a part."""
        return part * self.size - max(0, part - self.large)


def split_at_most(total: int, most: int) -> Split:
    """The fewest parts of at most `most` elements. Example: split_at_most(197, 14) is Split(15, 14, 2): 2 of 14 and 13 of 13."""
    return split_into(total, -(-total // most))


def split_into(total: int, parts: int) -> Split:
    """`total` in `parts` parts; no part is empty unless there are more parts than elements."""
    size = -(-total // parts)
    return Split(parts, size, total - parts * (size - 1))


def lane_chunks(count: int, lanes: int) -> list[tuple[int, int]]:
    """(start, width) of vectors of at most `lanes` that cover 0 .. count-1; every width is `lanes` or a smaller power of two."""
    chunks, start, width = [], 0, lanes
    while start < count:
        while width > count - start:
            width = 1 << ((width - 1).bit_length() - 1)
        chunks.append((start, width))
        start += width
    return chunks
