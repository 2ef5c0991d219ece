"""Recognition of quantized values by what they compute, whatever operators and views they came about by: the only place of it in loops.

    (cast(q) - zero) * scale                    q of 8 bits, or of 8 bits of which 4 matter
    table[cast(q)]                              weights from a codebook, as `index_select`, `gather`, `embedding` and `table[index]` are lowered

`affine` and `codebook_element` know the forms of a scalar; `quantized_operand` is the constant right operand of a product that is made of such
scalars, which lowering puts on the operation (`loops.ir.QuantizedOperand`) and engines read. A new form of weights is recognized here.

Sources: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018; Han, Mao,
Dally, "Deep Compression", ICLR 2016 (codebooks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.loops import ops as scalar
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Scalar
from torch_hybrid_backend.loops.ir import (
    Buffer,
    Call,
    Const,
    Expr,
    Load,
    Map,
    QuantizedOperand,
    Value,
    count_calls,
    domain_vars,
    loads_of,
    parts,
)

NARROW = ("int8", "uint8")

MOST_VALUES = 16  # of a codebook: integers of 4 bits tell so many apart

# To dequantize takes two, and what a scale is made of a few more: a division, a bound, a factor of SmoothQuant's.
_CHEAP_CALLS = 8


@dataclass(frozen=True, slots=True)
class Affine:
    """(cast(`integer`) - `zero`) * the product of `scales`; `zero` of 0 is None."""

    integer: Expr
    zero: Expr | None
    scales: tuple[Expr, ...]


def affine(e: Expr) -> Affine | None:
    """A scalar as an integer of 8 bits, shifted and scaled; None where it is none."""
    if e.dtype in NARROW:
        return Affine(e, None, ())
    if not isinstance(e, Call):
        return None
    match e.op:
        case "cast":
            inner = affine(e.args[0])
            # To fewer bits or to an integer, a cast may change the number.
            is_exact = scalar.is_float(e.dtype) or not scalar.is_float(e.args[0].dtype)
            return inner if is_exact and e.dtype != "bool" else None
        case "round":  # to a narrower float: a step of eager's that need not be taken
            return affine(e.args[0])
        case "mul":
            for one, other in (e.args, e.args[::-1]):
                if scalar.is_float(e.dtype) and (inner := affine(one)) is not None:
                    return Affine(inner.integer, inner.zero, (*inner.scales, other))
        case "sub":
            inner = affine(e.args[0])
            if inner is not None and inner.zero is None and not inner.scales:
                zero = _whole(e.args[1])
                if zero is not None:
                    is_none = isinstance(zero, Const) and zero.value == 0
                    return Affine(inner.integer, None if is_none else zero, ())
    return None


def _range(dtype: str) -> tuple[int, int]:
    """The least and the greatest number of an integer dtype."""
    bits = scalar.INTEGER_BITS[dtype]
    return (0, (1 << bits) - 1) if dtype == "uint8" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def bounded(e: Expr) -> tuple[Expr, tuple[int, int]]:
    """The integer that `e` is a clamp of, itself if it is none, and its bounds: `e` is the first clamped to the second."""
    low, high = _range(e.dtype)
    while isinstance(e, Call) and e.op in ("max", "min") and isinstance(e.args[1], Const):
        bound = int(e.args[1].value)
        inner = (max(low, bound), high) if e.op == "max" else (low, min(high, bound))
        if inner[0] > inner[1]:
            break  # no number lies there: which bound wins depends on the order
        (low, high), e = inner, e.args[0]
    return e, (low, high)


def constant_of(integer: Expr) -> Load | None:
    """The element of a constant that an integer of 8 bits is, or is a clamp of; None where it is none."""
    e, _ = bounded(integer)
    return e if isinstance(e, Load) and e.buffer.constant else None


def span(e: Expr) -> tuple[int, int]:
    """The least and the greatest value of an integer, as far as dtypes, casts and clamps tell."""
    inner, (low, high) = bounded(e)
    least, most = low, high
    if isinstance(inner, Const):
        least = most = int(inner.value)
    elif isinstance(inner, Call) and inner.op == "cast" and inner.args[0].dtype in scalar.INTEGER_BITS:
        least, most = span(inner.args[0])
    of_dtype = _range(inner.dtype)
    if least < of_dtype[0] or most > of_dtype[1]:
        return low, high  # the cast may wrap
    return min(max(least, low), high), min(max(most, low), high)


def _whole(zero: Expr) -> Expr | None:
    """A zero point as a scalar of int32, or of int64 where it has that; None where it need not be a whole number."""
    if isinstance(zero, Const):
        is_whole = float(zero.value).is_integer() and -(1 << 31) <= zero.value < 1 << 31
        return scalar.literal(int(zero.value), "int32") if is_whole else None
    # A cast between integers may wrap: it stays.
    while isinstance(zero, Call) and zero.op == "cast" and scalar.is_float(zero.dtype):
        zero = zero.args[0]
    if zero.dtype == "int64":
        return zero
    return scalar.cast(zero, "int32") if zero.dtype in scalar.INTEGER_BITS else None


def narrow_value(value: Value) -> Map | None:
    """The value of 8 bits, not in memory yet, that `value` is computed from."""
    stack, seen = [value], set[Value]()
    while stack:
        found = stack.pop()
        if found in seen or not isinstance(found, Map) or found.realized is not None:
            continue
        seen.add(found)
        if found.dtype in NARROW and found.base is None:
            return found
        stack += [parent for parent, _ in found.parents] + ([found.base] if found.base is not None else [])
    return None


def is_dequantized(value: Value) -> bool:
    """True if a value is cheaper to compute where it is read than to keep: an integer of 8 bits, shifted and scaled at little cost.

    What is gathered by indices in memory is not: rows of an embedding.
    """
    if value.dtype in NARROW:
        return False
    expr = value.at(domain_vars(value.shape))
    found = affine(expr)
    if found is None or count_calls(expr) > _CHEAP_CALLS:
        return False
    integer, _ = bounded(found.integer)
    return not (isinstance(integer, Load) and is_gathered(integer))


def is_gathered(load: Load) -> bool:
    """True if an element lies at a place that is read from memory, as the rows of an embedding do."""
    return len(loads_of(load)) > 1


def long_integers(value: Value) -> Map | None:
    """The integers of a value that are worth memory, as they are long to compute: a concatenation of several tensors, say. None of other
    values."""
    if value.dtype in NARROW or is_dequantized(value):
        return None
    expr = value.at(domain_vars(value.shape))
    found = affine(expr)
    if found is None or count_calls(expr) - count_calls(found.integer) > _CHEAP_CALLS:
        return None
    return narrow_value(value)


def is_quantized(e: Expr) -> bool:
    """True if a scalar is an integer of 8 bits that floats were rounded to; not one that was only cast, as masks and images are."""
    rounded = (part.args[0] for part in parts([e]) if isinstance(part, Call) and part.op == "round_even")
    return e.dtype in NARROW and any(scalar.is_float(each.dtype) for each in rounded)


@dataclass(frozen=True, slots=True, eq=False)
class Element:
    """An element of a quantized operand. `integer` lies between `bounds`; `scale` and `zero` are numbers, or read from constants."""

    integer: Expr
    bounds: tuple[int, int]
    scale: Load | Const
    zero: Load | Const
    table: Buffer | None = None


def codebook_element(e: Expr) -> Element | None:
    """A scalar as an element of a constant table, of float32, at a constant index of 8 bits, clamped to it; None where it is none."""
    if not isinstance(e, Load) or not e.buffer.constant or e.buffer.dtype != "float32" or len(e.buffer.shape) != 1:
        return None
    (size,), (place,) = e.buffer.shape, e.index
    if not isinstance(size, int) or size > MOST_VALUES or len(place.terms) != 1 or place.const != 0:
        return None
    ((atom, factor),) = place.terms
    if not isinstance(atom, Scalar) or factor != 1 or (atom.low, atom.high) != (0, size - 1):
        return None
    index = _unclamped(atom.expr, size)
    if not isinstance(index, Load) or not index.buffer.constant or index.buffer.dtype not in NARROW:
        return None
    inside = scalar.call("max", index, scalar.literal(0, index.dtype))
    inside = scalar.call("min", inside, scalar.literal(size - 1, index.dtype))
    return Element(inside, (0, size - 1), Const("float32", 1.0), Const("int32", 0), e.buffer)


def is_from_codebook(value: Value) -> bool:
    """True if each element of a value is an element of one small constant table."""
    return codebook_element(value.at(domain_vars(value.shape))) is not None


def _unclamped(e: Expr, size: int) -> Expr:
    """The expression that an index is read from: seen through casts to wider integers, and through clamping it to 0 .. size-1."""
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


def _element(e: Expr) -> Element | None:
    """A scalar as an element of a quantized operand; None where it is none, or reads something that is no constant or is computed."""
    if (found := codebook_element(e)) is not None:
        return found
    shifted = affine(e)
    if shifted is None or len(shifted.scales) > 1:
        return None
    integer, bounds = bounded(shifted.integer)
    scale = _number(shifted.scales[0]) if shifted.scales else Const("float32", 1.0)
    zero = Const("int32", 0) if shifted.zero is None else _number(shifted.zero)
    if not isinstance(integer, Load) or scale is None or scale.dtype != "float32" or zero is None:
        return None
    if not all(part.buffer.constant for part in (integer, scale, zero) if isinstance(part, Load)):
        return None
    return Element(shifted.integer, bounds, scale, zero)


def quantized_operand(b: Value) -> QuantizedOperand | None:
    """A matmul's right operand, (1, K, N) of known sizes, as constant integers with what they stand for; None where it is none.

    Each scale and zero point is of the whole operand, of a column, or of a group of neighbours along k: whole groups, one after the other.
    """
    batch, k, n = b.shape
    if isinstance(b, Buffer) or batch != 1 or not isinstance(k, int) or not isinstance(n, int):
        return None
    index = domain_vars(b.shape, "w")
    element = _element(b.at(index))
    if element is None:
        return None
    groups = {_group(part, index[1], k) for part in (element.scale, element.zero) if isinstance(part, Load)} or {k}
    group = groups.pop()
    if groups or group is None or k % group:
        return None

    def every(step: int, of: Callable[[Element], Expr], dtype: str) -> Map:
        """A part of the operand at every `step`-th k."""

        def at(place: tuple[Index, ...]) -> Expr:
            found = _element(b.at((place[0], place[1] * step, place[2])))
            assert found is not None
            return of(found)

        return Map((1, k // step, n), dtype, at)

    def number(of: Callable[[Element], Load | Const]) -> Value | float:
        part = of(element)
        return float(part.value) if isinstance(part, Const) else every(group, of, part.buffer.dtype)

    integers = every(1, lambda e: e.integer, element.integer.dtype)
    scales, zero_points = number(lambda e: e.scale), number(lambda e: e.zero)
    return QuantizedOperand(integers, element.bounds, scales, zero_points, group, element.table)


def _number(e: Expr) -> Load | Const | None:
    """A number, or a load that is cast."""
    while isinstance(e, Call) and e.op == "cast":
        e = e.args[0]
    return e if isinstance(e, Load | Const) else None


def _group(part: Load, k: Index, extent: int) -> int | None:
    """The number of neighbours along k that read the same element; None where they form no groups that lie one after the other."""
    variables, sizes = {atom for atom, _ in k.terms}, set()
    for index in part.index:
        for atom, _ in index.terms:
            if isinstance(atom, FloorDiv) and atom.numerator == k and isinstance(atom.divisor, int):
                sizes.add(atom.divisor)
            elif not isinstance(atom, LoopVar) or atom in variables:
                return None
    return extent if not sizes else sizes.pop() if len(sizes) == 1 else None
