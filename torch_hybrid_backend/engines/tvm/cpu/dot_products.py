"""Products of 8 and 16 bits by the processor's dot products: what it has, and how operands lie for them.

A dot product adds, in every 32-bit lane, the products of a few neighbours along k: four of 8 bits, two of 16. So k comes in *words* of 32
bits. The left operand is read word by word and broadcast, the right one is packed with k innermost in words:

    instruction   lanes' operands       sums      where
    vpdpbusd      4 uint8 by 4 int8     int32     AVX-512 VNNI, AVX-VNNI
    vpmaddwd      2 int16 by 2 int16    int32     everywhere else: 8 bits are widened when operands are packed, so nothing saturates
    vdpbf16ps     2 bf16 by 2 bf16      float32   AVX-512 BF16

vpdpbusd wants its left operand without signs. A signed one is moved up by 128 when its words are written, and what that adds to a column's
sums, 128 times the sum of its weights, is taken off where they start. Sums are exact and do not depend on the instruction.
Nothing here imports TVM.

Source: Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual", 2024; oneDNN, "Nuances of int8 computations".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_hybrid_backend.engines.tvm.cpu.packing import pack_b, packed_b_shape
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Expr, Map, Value, compute_dtype
from torch_hybrid_backend.sizes.size import Dim, ceil_div


@dataclass(frozen=True, slots=True)
class DotProduct:
    """Sums of `group` products a lane. `left`, `right`: dtypes of the operands in memory; `shift`: by how much left elements are moved there.

    `instruction` is "" for a plain multiplication, of which a word holds one.
    """

    instruction: str
    group: int
    left: str
    right: str
    sums: str
    shift: int = 0


def bf16_dot_product(target: Target) -> DotProduct | None:
    """The processor's dot product of bfloat16; None where it has none."""
    if target.lanes != 16 or "avx512_bf16" not in target.features:
        return None
    return DotProduct("vdpbf16ps", 2, "bfloat16", "bfloat16", "float32")


def integer_dot_product(left: str, right: str, target: Target, *, knows_right: bool) -> DotProduct | None:
    """The processor's dot product of integers of 8 bits, int8 or uint8; None where it has none.

    knows_right: the right operand is known ahead of calls, so that what moves a signed left operand can be made up for.
    """
    if target.lanes < 8:
        return None
    shift = 128 if left == "int8" else 0
    has_vnni = "avx512_vnni" in target.features or (target.lanes == 8 and "avx_vnni" in target.features)
    if has_vnni and right == "int8" and (knows_right or shift == 0):
        return DotProduct("vpdpbusd", 4, "uint8", right, "int32", shift)
    return DotProduct("vpmaddwd", 2, "int16", "int16", "int32")


def words(k: Dim, group: int) -> Dim:
    """How many words `k` elements take."""
    return ceil_div(k, group)


def left_words(a: Value, dot: DotProduct) -> Map:
    """A product's left operand (B, M, K) as words: (B, M, ceil(K / group) * group) of `dot.left`, moved, zeros beyond K."""
    batch, m, k = a.shape
    padded = words(k, dot.group) * dot.group
    zero = ops.const(0, compute_dtype(dot.left))

    def element(index: tuple[Index, ...]) -> Expr:
        if not dot.shift:
            return _converted(a.at(index), dot.left)
        moved = ops.add(ops.cast(a.at(index), "int32"), ops.const(dot.shift, "int32"))
        return ops.cast(moved, dot.left)

    def at(index: tuple[Index, ...]) -> Expr:
        return element(index) if padded == k else ops.guard(ops.index_in(index[2], 0, k), element(index), zero)

    parents = ((a, lambda index: index),) if padded == k else ()
    return Map((batch, m, padded), dot.left, at, parents)


def constant_words(a: torch.Tensor, dot: DotProduct) -> torch.Tensor:
    """`left_words` of a constant."""
    moved = a.to(torch.int32) + dot.shift if dot.shift else a
    return torch.nn.functional.pad(moved.to(getattr(torch, dot.left)), (0, -a.shape[2] % dot.group)).contiguous()


def _converted(e: Expr, dtype: str) -> Expr:
    return ops.cast(e, compute_dtype(dtype))


def packed_words_shape(batch: Dim, n: Dim, k: Dim, tile_n: int, group: int) -> tuple[Dim, Dim, Dim, int, int]:
    """The shape of a right operand in words: (batch, ceil(n / tile_n), ceil(k / group), tile_n, group)."""
    panels = packed_b_shape(batch, n, words(k, group), tile_n)
    return (*panels, group)


def pack_right(b: torch.Tensor, tile_n: int, dot: DotProduct) -> torch.Tensor:
    """Packs a product's right operand (B, K, N) as `packed_words_shape` says, in `dot.right`; elements beyond K and N are zero."""
    batch, k, n = b.shape
    count = -(-k // dot.group)
    whole = torch.nn.functional.pad(b.to(getattr(torch, dot.right)), (0, 0, 0, count * dot.group - k))
    # (B, words, group, N) -> words as rows, N * group columns.
    rows = whole.reshape(batch, count, dot.group, n).transpose(2, 3).reshape(batch, count, n * dot.group)
    return pack_b(rows, tile_n * dot.group).reshape(batch, -1, count, tile_n, dot.group)


def packed_right_value(b: Value, tile_n: int, dot: DotProduct) -> Map:
    """`pack_right` as a value."""
    batch, k, n = b.shape
    zero = ops.const(0, compute_dtype(dot.right))

    def at(index: tuple[Index, ...]) -> Expr:
        batch_index, tile, word, lane, element = index
        row, column = word * dot.group + element, tile * tile_n + lane
        inside = ops.call("and", ops.index_in(row, 0, k), ops.index_in(column, 0, n))
        return ops.guard(inside, _converted(b.at((batch_index, row, column)), dot.right), zero)

    return Map(packed_words_shape(batch, n, k, tile_n, dot.group), dot.right, at)


def column_sums(b: torch.Tensor, width: int, factor: int) -> torch.Tensor:
    """What a column's sums start at: (B, ceil(N / width) * width) int32, `factor` times the sum of each column of b (B, K, N), zero beyond N."""
    sums = b.sum(dim=1, dtype=torch.int64) * factor
    return torch.nn.functional.pad(sums, (0, -b.shape[2] % width)).to(torch.int32)
