"""Values of a small table, of which narrow integers say which: recognised by what a scalar computes, whatever operators it came about by.

    table[cast(load int8)]          as `index_select`, `gather`, `embedding` and `table[index]` are lowered: the integer clamped to the table

Source: weights that share few values: Han, Mao, Dally, "Deep Compression", ICLR 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.loops.index import Scalar
from torch_hybrid_backend.loops.integer_products import NARROW
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, Load, Value, domain_vars

MOST_VALUES = 16  # that integers of 4 bits tell apart


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """An element of `table`, (at most `MOST_VALUES`,) of float32: the one that `place`, of 8 bits, says, clamped to the table."""

    table: Buffer
    size: int
    place: Load


def lookup(e: Expr) -> Lookup | None:
    """A scalar as an element of a constant table that a constant says; None where it is none."""
    if not isinstance(e, Load) or not e.buffer.constant or e.buffer.dtype != "float32" or len(e.buffer.shape) != 1:
        return None
    (size,), (index,) = e.buffer.shape, e.index
    if not isinstance(size, int) or size > MOST_VALUES or len(index.terms) != 1 or index.const != 0:
        return None
    ((atom, factor),) = index.terms
    if not isinstance(atom, Scalar) or factor != 1 or (atom.low, atom.high) != (0, size - 1):
        return None
    place = _unclamped(atom.expr, size)
    is_constant = isinstance(place, Load) and place.buffer.constant and place.buffer.dtype in NARROW
    return Lookup(e.buffer, size, place) if isinstance(place, Load) and is_constant else None


def is_looked_up(value: Value) -> bool:
    """True if each element of a value is such an element of one table."""
    return lookup(value.at(domain_vars(value.shape))) is not None


def _unclamped(e: Expr, size: int) -> Expr:
    """The expression that a place is read from: seen through casts to wider integers, and through clamping it to 0 .. size-1."""
    while isinstance(e, Call):
        match e:
            case Call(op="cast") if e.dtype in ("int16", "int32", "int64"):
                pass
            case Call(op="max", args=(_, Const(value=0))):
                pass
            case Call(op="min", args=(_, Const() as most)) if most.value == size - 1:
                pass
            case _:
                return e
        e = e.args[0]
    return e
