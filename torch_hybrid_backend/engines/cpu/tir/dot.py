"""Dot products (`dot_products.py`) as TIR over vectors."""

from __future__ import annotations

from tvm import tirx

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.isa import ARM_DOT_PRODUCTS
from torch_hybrid_backend.engines.cpu.tir import arm, x86
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, TirBuffer, TirExpr


def load_word(array: TirBuffer, offset: TirExpr, dot: DotProduct, lanes: int) -> TirExpr:
    """The word of the left operand that begins at element `offset`, in every lane."""
    place = offset if dot.group == 1 else tirx.Ramp(offset, 1, dot.group)
    return tirx.Broadcast(tirx.reinterpret("int32", tirx.BufferLoad(array, [place])), lanes)


def load_neighbours(array: TirBuffer, offset: TirExpr, dot: DotProduct, count: int) -> TirExpr:
    """`count` words of the left operand from element `offset` on, one a lane."""
    return tirx.reinterpret(f"int32x{count}", tirx.BufferLoad(array, [tirx.Ramp(offset, 1, count * dot.group)]))


def load_words(array: TirBuffer, offset: TirExpr, dot: DotProduct, lanes: int) -> TirExpr:
    """The words of `lanes` columns of the right operand, from element `offset` on."""
    return tirx.BufferLoad(array, [tirx.Ramp(offset, 1, lanes * dot.group)])


def dot_product(
    builder: Builder, dot: DotProduct, lanes: int, total: TirExpr, left: TirExpr, right: TirExpr
) -> TirExpr:
    """total + the products of `left`, words, and `right`, in every lane."""
    if dot.instruction == "":
        return total + left * right
    of = arm if dot.instruction in ARM_DOT_PRODUCTS else x86
    return of.dot_product(builder, dot.instruction, lanes, total, left, right)
