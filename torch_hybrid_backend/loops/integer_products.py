"""Products of quantised operands: which integers an operand is made of, whatever operators it came about by.

A quantised operand is a value `(cast(q) - zero) * scale`, q of 8 bits. Where both operands of a product are, and their scales and zero
points do not change along the sum, the product is one of integers, and scales are its epilogue:

    sum over k of ((a - z) * s) * (b * t)  =  (sum over k of (a - z) * b) * s * t

A zero point of a matmul's right operand is taken off behind the sums, times the sum of the left one's row:

    sum over k of (a - z) * (b - y)  =  (sum over k of (a - z) * b) - y * ((sum over k of a) - K * z)

An operand says what it is by what it computes, so views, permutations and different spellings of dequantisation are all one case: the
quantise-dequantise graphs of torchao and of this package, and integer tensors that are multiplied as they are (`aten._int_mm`).
Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.loops import ops as scalar
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import (
    Buffer,
    Call,
    Const,
    ConvOp,
    Expr,
    IntegerConvOp,
    IntegerMatMulOp,
    Load,
    LoopOp,
    Map,
    MapOp,
    MatMulOp,
    ReduceOp,
    Value,
    count_calls,
    domain_vars,
    indices,
    parts,
)

NARROW = ("int8", "uint8")

# To dequantise takes two, and what a scale is made of a few more: a division, a bound, a factor of SmoothQuant's.
_CHEAP_CALLS = 8

# Gives a value of 8 bits memory, or what has it already.
Realize = Callable[[Value], Value]


@dataclass(frozen=True, slots=True)
class Affine:
    """(cast(`integer`) - `zero`) * the product of `scales`; `zero` of 0 is None."""

    integer: Expr
    zero: Expr | None
    scales: tuple[Expr, ...]


def affine(e: Expr) -> Affine | None:
    """A scalar as an integer of 8 bits, moved and scaled; None where it is none."""
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


def _span(e: Expr) -> tuple[int, int]:
    """Between which numbers an integer lies, as far as dtypes, casts and clamps tell."""
    inner, (low, high) = bounded(e)
    least, most = low, high
    if isinstance(inner, Const):
        least = most = int(inner.value)
    elif isinstance(inner, Call) and inner.op == "cast" and inner.args[0].dtype in scalar.INTEGER_BITS:
        least, most = _span(inner.args[0])
    of_dtype = _range(inner.dtype)
    if least < of_dtype[0] or most > of_dtype[1]:
        return low, high  # the cast may wrap
    return min(max(least, low), high), min(max(most, low), high)


def _fits(depth: int, left: Affine, right: Affine, zero: Expr | None) -> bool:
    """True if an int32 holds the sum of `depth` products of the operands' integers, whatever they are, those of `left` moved by `zero`.

    Partial sums need not fit: int32 wraps, and what instructions move operands by cancels.
    """
    products = [one * other for one in _moved(left.integer, zero) for other in _span(right.integer)]
    return depth * min(products) >= -(1 << 31) and depth * max(products) < 1 << 31


def _moved(integer: Expr, zero: Expr | None) -> tuple[int, int]:
    """Between which numbers an integer lies that a zero point is taken off."""
    low, high = _span(integer)
    least, most = (0, 0) if zero is None else _span(zero)
    return low - most, high - least


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


def _varies_along(e: Expr, along: tuple[Index, ...]) -> bool:
    """True if a scalar changes with any of the loop variables."""
    wanted = {atom for index in along for atom, _ in index.terms}
    found = {
        leaf
        for part in parts([e], within_indices=True)
        for index in indices(part)
        for leaf in index.leaves()
        if isinstance(leaf, LoopVar)
    }
    return not found.isdisjoint(wanted)


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    """A quantised operand. Nothing but its integers changes along the dimensions that are summed."""

    value: Value

    def at(self, *index: Index) -> Affine:
        """The operand at an index; any will do in the dimensions that are summed."""
        found = affine(self.value.at(index))
        assert found is not None
        return found

    @property
    def first(self) -> Affine:
        return self.at(*map(as_index, [0] * len(self.value.shape)))

    def integers(self, realize: Realize) -> Value:
        """Its integers in memory: a buffer, or a view of one."""
        own = _narrow(self.value)
        if own is not None:
            realize(own)

        def at(index: tuple[Index, ...]) -> Expr:
            return self.at(*index).integer

        index = domain_vars(self.value.shape)
        expr = at(index)
        if isinstance(expr, Load) and expr.index == index and expr.buffer.shape == self.value.shape:
            return expr.buffer
        read = constant_of(expr) or expr  # a constant's clamp needs no memory: it is done where the constant is packed
        base = read.buffer if isinstance(read, Load) else None
        return Map(self.value.shape, expr.dtype, at, ((self.value, lambda index: index),), base)


def _narrow(value: Value) -> Map | None:
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


def _operand(value: Value, summed: tuple[int, ...]) -> _Operand | None:
    """`value` as a quantised operand of a sum over the dimensions `summed`; None where it is none."""
    index = domain_vars(value.shape)
    found = affine(value.at(index))
    if found is None:
        return None
    fixed = (*found.scales, *(() if found.zero is None else (found.zero,)))
    along = tuple(index[d] for d in summed)
    return None if any(_varies_along(part, along) for part in fixed) else _Operand(value)


def is_dequantised(value: Value) -> bool:
    """True if a value is cheaper to compute where it is read than to keep: an integer of 8 bits, moved and scaled by what is no work itself."""
    if value.dtype in NARROW:
        return False
    expr = value.at(domain_vars(value.shape))
    return affine(expr) is not None and count_calls(expr) <= _CHEAP_CALLS


def long_integers(value: Value) -> Map | None:
    """The integers of a value that is dequantised from them once they are in memory, as they are long to compute: a concatenation of several
    tensors, say. None of other values."""
    if value.dtype in NARROW or is_dequantised(value):
        return None
    expr = value.at(domain_vars(value.shape))
    found = affine(expr)
    if found is None or count_calls(expr) - count_calls(found.integer) > _CHEAP_CALLS:
        return None
    return _narrow(value)


def is_quantised(e: Expr) -> bool:
    """True if a scalar is an integer of 8 bits that floats were rounded to; not one that was only cast, as masks and images are."""
    rounded = (part.args[0] for part in parts([e]) if isinstance(part, Call) and part.op == "round_even")
    return e.dtype in NARROW and any(scalar.is_float(each.dtype) for each in rounded)


def integer_product(op: MatMulOp | ConvOp, realize: Realize) -> tuple[LoopOp, ...] | None:
    """A product as one of integers, and what makes its result of that, which is last; None where it is none.

    Both operands are quantised; a convolution's right one is constant and symmetric. `realize`: called with what the product reads.
    """
    if isinstance(op, IntegerMatMulOp | IntegerConvOp) or (
        not scalar.is_float(op.out.dtype) and op.out.dtype not in _HALF
    ):
        return None
    (left, of_left), (right, of_right) = (
        ((op.a, (2,)), (op.b, (1,)))
        if isinstance(op, MatMulOp)
        else ((op.x, (1, *_spatial(op.x))), (op.w, (1, *_spatial(op.w))))
    )
    a, b = _operand(left, of_left), _operand(right, of_right)
    if a is None or b is None or (isinstance(op, ConvOp) and b.first.zero is not None):
        return None
    depth = 1
    for size in (left.shape[2],) if isinstance(op, MatMulOp) else op.w.shape[1:]:
        if not isinstance(size, int):
            return None
        depth *= size
    if isinstance(op, ConvOp) and constant_of(b.first.integer) is None:
        return None
    fits = _fits(depth, a.first, b.first, a.first.zero)
    sums = Buffer(op.out.shape, "int32" if fits else "float64", "sums")
    if isinstance(op, ConvOp):
        return _convolution(op, a, b, sums, realize) if fits else None
    if b.first.zero is not None:
        return _moved_matmul(op, a, b, depth, realize)
    # Where only a zero point is too large, it is taken off in float64.
    return _matmul(op, a, b, sums, realize) if fits or _fits(depth, a.first, b.first, None) else None


_HALF = ("bfloat16", "float16")


def _spatial(value: Value) -> tuple[int, ...]:
    return tuple(range(2, len(value.shape)))


def _matmul(op: MatMulOp, a: _Operand, b: _Operand, sums: Buffer, realize: Realize) -> tuple[LoopOp, MapOp]:
    none = as_index(0)

    def zero(index: tuple[Index, ...]) -> Expr:
        found = a.at(*index, none).zero
        assert found is not None
        return found

    integers = a.integers(realize), b.integers(realize)
    product = IntegerMatMulOp(sums, *integers, None if a.first.zero is None else zero)
    return product, _scaled(op.out, sums, _scales_of(op, a, b))


def _scales_of(op: MatMulOp, a: _Operand, b: _Operand) -> Callable[[tuple[Index, ...]], tuple[Expr, ...]]:
    none = as_index(0)

    def scales(index: tuple[Index, ...]) -> tuple[Expr, ...]:
        batch, row, column = index
        matrix = none if op.b.shape[0] == 1 else batch
        return (*a.at(batch, row, none).scales, *b.at(matrix, none, column).scales)

    return scales


def _moved_matmul(op: MatMulOp, a: _Operand, b: _Operand, depth: int, realize: Realize) -> tuple[LoopOp, ...] | None:
    """Operations as of `_matmul`, where the right operand has a zero point; None where int32 may not hold all that is computed."""
    left, right = a.first, b.first
    assert right.zero is not None
    most = max(map(abs, (*_span(right.integer), *_span(right.zero), *_moved(right.integer, right.zero))))
    if depth * most * max(map(abs, (*_span(left.integer), *_moved(left.integer, left.zero)))) >= 1 << 31:
        return None
    none = as_index(0)
    sums, rows = Buffer(op.out.shape, "int32", "sums"), Buffer(op.a.shape[:2], "int32", "rows")
    product, _ = _matmul(op, a, b, sums, realize)
    assert isinstance(product, IntegerMatMulOp)
    integers = product.a
    of_rows = ReduceOp(rows, op.a.shape, (2,), "sum", lambda index: scalar.cast(integers.at(index), "int32"))

    def moved(index: tuple[Index, ...]) -> Expr:
        batch, row, column = index
        total, own = rows.at((batch, row)), a.at(batch, row, none).zero
        if own is not None:
            total = scalar.sub(total, scalar.mul(scalar.cast(own, "int32"), scalar.literal(depth, "int32")))
        zero = b.at(none if op.b.shape[0] == 1 else batch, none, column).zero
        assert zero is not None
        return scalar.sub(sums.at(index), scalar.mul(scalar.cast(zero, "int32"), total))

    return of_rows, product, _scaled(op.out, sums, _scales_of(op, a, b), moved)


def _convolution(op: ConvOp, x: _Operand, w: _Operand, sums: Buffer, realize: Realize) -> tuple[LoopOp, MapOp] | None:
    zero, lowest = x.first.zero, -128 if x.first.integer.dtype == "int8" else 0
    # What lies around the image is one of the numbers that it may have.
    if zero is not None and not (isinstance(zero, Const) and lowest <= int(zero.value) < lowest + 256):
        return None
    none = as_index(0)

    def scales(index: tuple[Index, ...]) -> tuple[Expr, ...]:
        image, channel, *_ = index
        return (
            *x.at(image, *[none] * (len(index) - 1)).scales,
            *w.at(channel, *[none] * (len(index) - 1)).scales,
        )

    product = IntegerConvOp(
        sums,
        x.integers(realize),
        w.integers(realize),
        op.stride,
        op.padding,
        op.dilation,
        op.groups,
        0 if zero is None else int(zero.value),
    )
    return product, _scaled(op.out, sums, scales)


def _scaled(
    out: Buffer,
    sums: Buffer,
    scales: Callable[[tuple[Index, ...]], tuple[Expr, ...]],
    moved: Callable[[tuple[Index, ...]], Expr] | None = None,
) -> MapOp:
    """`sums`, or what `moved` makes of them, times the scales."""

    def at(index: tuple[Index, ...]) -> Expr:
        result = scalar.cast((moved or sums.at)(index), "float32")
        for scale in scales(index):
            result = scalar.mul(result, scalar.cast(scale, "float32"))
        return result

    return MapOp(out, Map(out.shape, out.dtype, at, ((sums, lambda index: index),)))
