"""Formats of the operands that AMX multiplies, and their place in tiles.

A tile is a register of 16 rows of 64 bytes. One instruction multiplies a tile of A, 16 rows by 64 bytes of k, by a tile of B, 64 bytes of k by
16 columns, in which the 4 bytes of k that belong to one column lie side by side. It adds to a tile of 16 x 16 sums of 32 bits. Kernels work on
panels of two tiles: 32 rows of A, 32 columns of B, and `depth` elements of k, which is one *step*.

    A of a panel of rows      (steps, parts, 32 rows, depth)
    B of a panel of columns   (steps, parts, 2 tiles, 16, 16 columns, elements of k in 4 bytes)

Formats of float32 hold each number as the sum of `parts` bfloat16, rounded to nearest: three are exact. With x = x0 + x1 + x2, |x1| <= 2^-8
|x| and |x2| <= 2^-17 |x|, the products that "float32" leaves out (x1 y2, x2 y1, x2 y2) are at most 2^-23.9 |x y| in all, and of either sign:
about what float32 itself loses where it rounds once. "float32 high" leaves out at most 2^-14.9 |x y|. Products are summed in float32: an
instruction adds 32 of them to a sum with one rounding, so six instructions round less often than eager's 32 additions, and parts of a long
k are summed apart. Root mean square errors over |A| |B| at k = 768 on a processor with AMX, normally distributed operands: torch.mm
2.0e-8, "float32" 1.2e-8, "float32 high" 2.5e-7. With all small products of k before the large ones it would be 5.6e-9, and 15 % slower:
the large parts would be read twice.

That holds where every number is 0 or has a magnitude from `SMALLEST` to `LARGEST`: parts and products are then normal float32 (tiles take
denormal ones for 0), and no sum of fewer than 2^30 products overflows. A panel of B with another number, infinities and NaN included, is
*plain*: its first two parts are the upper and lower halves of the numbers' bits. Kernels multiply such panels, and rows of A with such
numbers, in float32.

A finite float16 is exactly the sum of two bfloat16, denormal ones too: 11 bits are 8 and 3, and the smallest number is 2^-24. "float16 split"
leaves out x1 y1, at most 2^-16 |x y| and of either sign, where rounding the result to float16 loses up to 2^-11 of it. A processor with
AMX-FP16 multiplies float16 as it is ("float16"), denormal numbers and infinities included, by a third of the products.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS, TDPFP16PS and TDPBUSD; Henry, Tang & Heinecke,
"Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019.

Nothing here imports TVM or torch: the kernel compiler has none of the latter.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

# Rows of A, and columns of B, of a panel.
PANEL = 32
ROW_BYTES = 64
SMALLEST, LARGEST = 2.0**-48, 2.0**48
# Channels are read in vectors of so many.
_VECTOR = 16


@dataclass(frozen=True, slots=True)
class TileFormat:
    """A way of multiplying two operands.

    `operand`: the dtype of A's elements; `dtype`: of the parts of B in memory; `sums`: of the sums. `instruction`: LLVM's name. `parts`: of
    each number. `products`: those of parts, as (of A, of B), in the order in which each step of k adds them.
    """

    operand: str
    dtype: str
    sums: str
    instruction: str
    parts: int = 1
    products: tuple[tuple[int, int], ...] = ((0, 0),)

    @property
    def a_dtype(self) -> str:
        """The dtype of the parts of A."""
        return self.dtype if self.splits else self.operand

    @property
    def itemsize(self) -> int:
        return 1 if self.dtype == "int8" else 2

    @property
    def depth(self) -> int:
        """Elements of k in one step."""
        return ROW_BYTES // self.itemsize

    @property
    def panel_elements(self) -> int:
        """Elements of one step and one part of a panel, of A and of B alike."""
        return PANEL * self.depth

    @property
    def copy_cycles(self) -> float:
        """The cycles that a processor takes to write an element of A, all its parts, to a tile."""
        return 0.7 if self.splits else 0.15 * self.itemsize

    @property
    def splits(self) -> bool:
        """True if operands are split into parts."""
        return self.parts > 1

    @property
    def by_integers(self) -> TileFormat:
        """The same A by a B that is one part: integers of 8 bits, which bfloat16 holds exactly."""
        return dataclasses.replace(self, products=tuple(pair for pair in self.products if pair[1] == 0))

    def steps(self, k: int) -> int:
        return -(-k // self.depth)

    def gathers(self, channels: int) -> bool:
        """True if rows of A are copied together pixel by pixel (im2col), where an image has too few channels to fill a step of k."""
        return not self.splits and channels < _VECTOR

    def pixel_depth(self, channels: int) -> int:
        """Elements of k that one pixel's channels take: whole steps, or for few channels the next power of two."""
        return 1 << (channels - 1).bit_length() if self.gathers(channels) else self.steps(channels) * self.depth

    def gathered_vectors(self, channels: int, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> int:
        """Vectors in which a row of few channels is copied: lines of the kernel, or its pixels where they are apart."""
        pixels = kernel[-1] if dilation[-1] == 1 else 1
        return math.prod(kernel) // pixels * self.steps(pixels * self.pixel_depth(channels))

    def conv_depth(self, channels: int, kernel: tuple[int, ...]) -> int:
        """Elements of k of a convolution: the channels of a pixel for each of the kernel's positions."""
        return math.prod(kernel) * self.pixel_depth(channels)

    def packed_shape(self, batch: int, k: int, n: int) -> tuple[int]:
        """Elements of a packed B: its panels, and where operands are split a number for each panel: 0, or 1 where it is plain."""
        panels = batch * -(-n // PANEL)
        size = panels * self.steps(k) * self.parts * self.panel_elements
        return (size + (panels if self.splits else 0),)


# One operand's tiles stay from a product to the next: 14 tile loads for 24 instructions in "float32".
FORMATS: dict[str, TileFormat] = {
    "float32": TileFormat(
        "float32",
        "bfloat16",
        "float32",
        "tdpbf16ps",
        3,
        ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2)),
    ),
    "float32 high": TileFormat("float32", "bfloat16", "float32", "tdpbf16ps", 2, ((1, 0), (0, 0), (0, 1))),
    "float16 split": TileFormat("float16", "bfloat16", "float32", "tdpbf16ps", 2, ((1, 0), (0, 0), (0, 1))),
    "float16": TileFormat("float16", "float16", "float32", "tdpfp16ps"),
    "bfloat16": TileFormat("bfloat16", "bfloat16", "float32", "tdpbf16ps"),
    "uint8": TileFormat("uint8", "int8", "int32", "tdpbusd"),
    "int8": TileFormat("int8", "int8", "int32", "tdpbssd"),
}
