"""TIR expressions that schedules are written in: constants, selections, conversions, vectors.

    from torch_hybrid_backend.engines.cpu.tir import expressions as tir

    tir.select(b.index(row) < tir.const(4, "int32"), value, tir.const(0, "float32"))

Sums, products, shifts, bitwise operations and the comparisons `<`, `<=`, `>`, `>=` are Python's operators on expressions. Operands have one
dtype: nothing is promoted. A dtype is one of a scalar ("float32") or of a vector ("float32x16").
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir.builder import TirExpr


def const(value: float, dtype: str) -> TirExpr:
    """A number of `dtype`, infinities and NaN included; of a vector's dtype, the number in every lane."""
    return tirx.const(value, dtype)


def select(condition: TirExpr, then: TirExpr, otherwise: TirExpr) -> TirExpr:
    """`then` where the bool `condition` holds, else `otherwise`, lane by lane. Both are computed."""
    return tirx.Select(condition, then, otherwise)


def minimum(a: TirExpr, b: TirExpr) -> TirExpr:
    """The smaller of two numbers of one dtype. With a NaN either may result."""
    return tirx.Min(a, b)


def maximum(a: TirExpr, b: TirExpr) -> TirExpr:
    """The larger of two numbers of one dtype. With a NaN either may result."""
    return tirx.Max(a, b)


def equal(a: TirExpr, b: TirExpr) -> TirExpr:
    """True, a bool, where two numbers of one dtype are equal. For indices there is `Builder.equal`."""
    return tirx.EQ(a, b)


def logical_and(a: TirExpr, b: TirExpr) -> TirExpr:
    """The conjunction of two bool."""
    return tirx.And(a, b)


def logical_or(a: TirExpr, b: TirExpr) -> TirExpr:
    """The disjunction of two bool."""
    return tirx.Or(a, b)


def logical_not(a: TirExpr) -> TirExpr:
    """The negation of a bool."""
    return tirx.Not(a)


def truncdiv(a: TirExpr, b: TirExpr) -> TirExpr:
    """The quotient of two integers, rounded towards zero."""
    return tirx.truncdiv(a, b)


def cast(value: TirExpr, dtype: str) -> TirExpr:
    """A number converted to `dtype`, of as many lanes: integers wrap, floats are rounded towards zero to integers.

    Conversions that must agree with eager's go through `arithmetic.cast`, of what arrays hold through `storage.widen` and `narrow`.
    """
    return tirx.Cast(dtype, value)


def reinterpret(value: TirExpr, dtype: str) -> TirExpr:
    """The same bits as a value of `dtype`, which has as many bits in all: "int32x16" may become "int8x64"."""
    return tirx.reinterpret(dtype, value)


def broadcast(value: TirExpr, lanes: int) -> TirExpr:
    """A scalar in every lane of a vector."""
    return tirx.Broadcast(value, lanes)


def word_of(number: int, group: int, lanes: int) -> TirExpr:
    """A word of 32 bits in every lane, int32: `group` times the same number, of 32 / `group` bits each."""
    bits = 32 // group
    word = sum((number & ((1 << bits) - 1)) << (bits * place) for place in range(group))
    return broadcast(const(word - (1 << 32) if word >> 31 else word, "int32"), lanes)


def ramp(start: TirExpr, step: TirExpr, lanes: int) -> TirExpr:
    """The vector start, start + step, start + 2 step, ... of integers."""
    return tirx.Ramp(start, step, lanes)


def shuffle(vectors: Sequence[TirExpr], lanes: Sequence[int]) -> TirExpr:
    """A vector of the named lanes of `vectors`, whose lanes are numbered one vector after the other."""
    return tirx.Shuffle(list(vectors), list(lanes))


def splat(vector: TirExpr, lane: int, lanes: int) -> TirExpr:
    """A lane of a vector in every lane."""
    return tirx.Shuffle([vector], [lane] * lanes)


def itemsize(dtype: str) -> int:
    """Bytes of an element in an array; of a vector's dtype, of the vector."""
    kind = tvm.DataType(dtype)
    return int(kind.bits) * int(kind.lanes) // 8
