"""Products of 8 and 16 bits by the processor's dot products: what it has, and how operands lie for them.

A dot product adds, in every 32-bit lane, the products of a few neighbours along k: four of 8 bits, two of 16. So k comes in *words* of 32
bits. The left operand is read word by word and broadcast, the right one is packed with k innermost in words:

    instruction   lanes' operands       sums      where
    vpdpbusd      4 uint8 by 4 int8     int32     AVX-512 VNNI, AVX-VNNI
    vpmaddubsw    4 uint8 by 4 int8     int32     AVX2, AVX-512: the sum of two products has 16 bits, so weights must have 7
    vpmaddwd      2 int16 by 2 int16    int32     there for other operands: 8 bits are widened when they are packed, so nothing saturates
    vdpbf16ps     2 bf16 by 2 bf16      float32   AVX-512 BF16
    sdot          4 int8 by 4 int8      int32     AArch64 with FEAT_DotProd
    udot          4 uint8 by 4 uint8    int32     AArch64 with FEAT_DotProd
    usdot         4 uint8 by 4 int8     int32     AArch64 with FEAT_I8MM
    bfdot         2 bf16 by 2 bf16      float32   AArch64 with FEAT_BF16
    smmla         8 int8 by 8 int8      int32     AArch64 with FEAT_I8MM, as the next two: blocks of 2 rows by 2 columns
    ummla         8 uint8 by 8 uint8    int32
    usmmla        8 uint8 by 8 int8     int32
    bfmmla        4 bf16 by 4 bf16      float32   AArch64 with FEAT_BF16: blocks of 2 rows by 2 columns

vpmaddubsw stands for three instructions: itself, which adds two neighbouring products in 16 bits, vpmaddwd by ones, which adds two of those
sums in 32, and the addition. Weights of 7 bits are those that the graph clamps so (`codegen.operands.StridedView.bounds`).

vpdpbusd and vpmaddubsw take the same words, and want their left operand without signs. A signed one is moved up by 128 when its words are
written, and what that adds to a column's sums, 128 times the sum of its weights, is taken off where they start. Sums are exact and do not
depend on the instruction. sdot, udot, smmla and ummla want both operands with signs, or both without: a left one that differs is moved
likewise, down or up.

The last four multiply two rows by two columns: a vector of sums holds (row 0, column 0), (0, 1), (1, 0) and (1, 1). A word is 64 bits of k,
and the work is twice a dot product's. The words of two rows are put together as they are read.
Nothing here imports TVM or torch.

Source: Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual", 2024; oneDNN, "Nuances of int8 computations".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.core.precision import ROW_GROUPS, are_seven_bits
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.sizes.size import Dim

# Bytes of a number of a row of float32 that is multiplied as integers (`schedules/matmul/integer_rows.py`): all that keep its digits.
ROW_PARTS = 3
# The largest group of numbers that share a scale, by their bytes. The sum of 256 of three bytes fits into 32 bits.
_MOST_IN_ROW = {1: ROW_GROUPS[8], 2: ROW_GROUPS[16], 3: 256}


@dataclass(frozen=True, slots=True)
class DotProduct:
    """Sums of `group` products a lane. `left`, `right`: dtypes of the operands in memory; `shift`: by how much left elements are moved there.

    `instruction` is "" for a plain multiplication, of which a word holds one. `rows`: 2 where a vector holds the sums of two rows of the left
    operand and two columns of the right one; 1 where its lanes are columns.
    """

    instruction: str
    group: int
    left: str
    right: str
    sums: str
    shift: int = 0
    rows: int = 1

    @property
    def registers(self) -> int:
        """Vector registers for what is multiplied and not added yet. Few sums suffice where an addition alone waits for the last."""
        return {"vpmaddwd": 4, "vpmaddubsw": 3}.get(self.instruction, 0)


# Bytes of the left and of the right operand -> the instruction that multiplies pairs of rows. int8 by uint8 has none.
_OF_PAIRS = {("int8", "int8"): "smmla", ("uint8", "uint8"): "ummla", ("uint8", "int8"): "usmmla"}
# A word of one element, multiplied as it is.
MULTIPLICATION = DotProduct("", 1, "int32", "int32", "int32")


def bf16_dot_product(target: Target, rows: Dim = 1, depth: Dim = 1) -> DotProduct | None:
    """The processor's dot product of bfloat16; None where it has none. For `rows` rows of `depth` elements, in pairs where there are any."""
    if "bfmmla" in target.isa.dot_products and rows != 1 and isinstance(depth, int) and depth % 4 == 0:
        return DotProduct("bfmmla", 4, "bfloat16", "bfloat16", "float32", rows=2)
    found = next((name for name in ("vdpbf16ps", "bfdot") if name in target.isa.dot_products), None)
    return None if found is None else DotProduct(found, 2, "bfloat16", "bfloat16", "float32")


def integer_dot_product(
    left: str, right: str, target: Target, *, knows_sums: bool, bounds: tuple[int, int] | None = None, rows: Dim = 1
) -> DotProduct | None:
    """The processor's dot product of integers of 8 bits, int8 or uint8; None where it has none.

    knows_sums: the sums of the right operand are at hand, so that what moves a signed left operand can be made up for. bounds: between which
    the elements of the right operand lie, where that is less than their dtype's. rows: of the left operand, multiplied in pairs if they can be.
    """
    has = target.isa.dot_products
    if "smmla" in has and rows != 1 and right in ("int8", "uint8") and (knows_sums or (left, right) in _OF_PAIRS):
        moved, shift = (left, 0) if (left, right) in _OF_PAIRS else (right, 128)
        return DotProduct(_OF_PAIRS[moved, right], 8, moved, right, "int32", shift, rows=2)
    if "usdot" in has and (left, right) == ("uint8", "int8"):
        return DotProduct("usdot", 4, left, right, "int32")
    if "sdot" in has and right in ("int8", "uint8") and (knows_sums or left == right):
        instruction = "sdot" if right == "int8" else "udot"
        return DotProduct(
            instruction, 4, right, right, "int32", 0 if left == right else 128 if left == "int8" else -128
        )
    shift = 128 if left == "int8" else 0
    if right == "int8" and (knows_sums or shift == 0):
        if "vpdpbusd" in has:
            return DotProduct("vpdpbusd", 4, "uint8", right, "int32", shift)
        if "vpmaddubsw" in has and bounds is not None and are_seven_bits(bounds):
            return DotProduct("vpmaddubsw", 4, "uint8", right, "int32", shift)
    return DotProduct("vpmaddwd", 2, "int16", "int16", "int32") if "vpmaddwd" in has else None


def row_parts(bits: int, *, may_round: bool) -> int:
    """Bytes of a number of a row that may be rounded to `bits` bits, one of `ACTIVATION_BITS`; to 16 where PyTorch's settings `may_round`."""
    return min(bits // 8, 2 if may_round else ROW_PARTS)


def row_group(group: int, parts: int, target: Target) -> int | None:
    """In groups of how many a row of float32 is written as integers of `parts` bytes, for weights whose scales are of groups of `group`: the
    most that there can be in whole vectors; None where there is no such number."""
    sizes = range(min(group, _MOST_IN_ROW[parts]) // target.lanes * target.lanes, 0, -target.lanes)
    return next((size for size in sizes if group % size == 0), None)


def row_dot_product(group: int, rows: int, vectors: int, parts: int, target: Target) -> DotProduct | None:
    """The dot product by which `rows` rows of float32 are multiplied with `vectors` vectors of columns as integers of `parts` bytes; None where
    they are not."""
    dot = integer_dot_product("uint8", "int8", target, knows_sums=True)
    if dot is None or dot.instruction != "vpdpbusd" or row_group(group, parts, target) is None:
        return None
    # A sum for each part, the sum of groups; two masks, the words of a vector, a word of a row.
    return dot if (parts + 1) * rows * vectors + 6 <= target.isa.registers else None
