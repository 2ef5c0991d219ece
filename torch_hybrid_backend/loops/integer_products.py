"""Products of quantized operands as products of integers.

A quantized operand (`loops.quantized.affine`) is a value `(cast(q) - zero) * scale`, q of 8 bits. Where both operands of a product are, and
their scales and zero points do not change along the sum, the product is one of integers, and scales are its epilogue:

    sum over k of ((a - z) * s) * (b * t)  =  (sum over k of (a - z) * b) * s * t

A zero point of a matmul's right operand is taken off behind the sums, times the sum of the left one's row:

    sum over k of (a - z) * (b - y)  =  (sum over k of (a - z) * b) - y * ((sum over k of a) - K * z)

An operand says what it is by what it computes, so views, permutations and different spellings of dequantization are all one case: the
quantize-dequantize graphs of torchao and of this package, and integer tensors that are multiplied as they are (`aten._int_mm`).
Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.loops import ops as scalar
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import (
    Buffer,
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
    domain_vars,
    indices,
    parts,
)
from torch_hybrid_backend.loops.quantized import Affine, affine, constant_of, narrow_value, span

# Gives a value of 8 bits memory, or what has it already.
Realize = Callable[[Value], Value]


def _fits(depth: int, left: Affine, right: Affine, zero: Expr | None) -> bool:
    """True if an int32 holds the sum of `depth` products of the operands' integers, whatever they are, those of `left` shifted by `zero`.

    Partial sums need not fit: int32 wraps, and what instructions move operands by cancels.
    """
    products = [one * other for one in _shifted(left.integer, zero) for other in span(right.integer)]
    return depth * min(products) >= -(1 << 31) and depth * max(products) < 1 << 31


def _shifted(integer: Expr, zero: Expr | None) -> tuple[int, int]:
    """The least and the greatest value of an integer that a zero point is taken off."""
    low, high = span(integer)
    least, most = (0, 0) if zero is None else span(zero)
    return low - most, high - least


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
    """A quantized operand. Nothing but its integers changes along the dimensions that are summed."""

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
        own = narrow_value(self.value)
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


def _operand(value: Value, summed: tuple[int, ...]) -> _Operand | None:
    """`value` as a quantized operand of a sum over the dimensions `summed`; None where it is none."""
    index = domain_vars(value.shape)
    found = affine(value.at(index))
    if found is None:
        return None
    fixed = (*found.scales, *(() if found.zero is None else (found.zero,)))
    along = tuple(index[d] for d in summed)
    return None if any(_varies_along(part, along) for part in fixed) else _Operand(value)


def integer_product(op: MatMulOp | ConvOp, realize: Realize) -> tuple[LoopOp, ...] | None:
    """A product as one of integers, and what makes its result of that, which is last; None where it is none.

    Both operands are quantized; a convolution's right one is constant and symmetric. `realize`: called with what the product reads.
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
        return _shifted_matmul(op, a, b, depth, realize)
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


def _shifted_matmul(op: MatMulOp, a: _Operand, b: _Operand, depth: int, realize: Realize) -> tuple[LoopOp, ...] | None:
    """Operations as of `_matmul`, where the right operand has a zero point; None where int32 may not hold all that is computed."""
    left, right = a.first, b.first
    assert right.zero is not None
    most = max(map(abs, (*span(right.integer), *span(right.zero), *_shifted(right.integer, right.zero))))
    if depth * most * max(map(abs, (*span(left.integer), *_shifted(left.integer, left.zero)))) >= 1 << 31:
        return None
    none = as_index(0)
    sums, rows = Buffer(op.out.shape, "int32", "sums"), Buffer(op.a.shape[:2], "int32", "rows")
    product, _ = _matmul(op, a, b, sums, realize)
    assert isinstance(product, IntegerMatMulOp)
    integers = product.a
    of_rows = ReduceOp(rows, op.a.shape, (2,), "sum", lambda index: scalar.cast(integers.at(index), "int32"))

    def shifted(index: tuple[Index, ...]) -> Expr:
        batch, row, column = index
        total, own = rows.at((batch, row)), a.at(batch, row, none).zero
        if own is not None:
            total = scalar.sub(total, scalar.mul(scalar.cast(own, "int32"), scalar.literal(depth, "int32")))
        zero = b.at(none if op.b.shape[0] == 1 else batch, none, column).zero
        assert zero is not None
        return scalar.sub(sums.at(index), scalar.mul(scalar.cast(zero, "int32"), total))

    return of_rows, product, _scaled(op.out, sums, _scales_of(op, a, b), shifted)


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
    shifted: Callable[[tuple[Index, ...]], Expr] | None = None,
) -> MapOp:
    """`sums`, or `shifted` ones, times the scales."""

    def at(index: tuple[Index, ...]) -> Expr:
        result = scalar.cast((shifted or sums.at)(index), "float32")
        for scale in scales(index):
            result = scalar.mul(result, scalar.cast(scale, "float32"))
        return result

    return MapOp(out, Map(out.shape, out.dtype, at, ((sums, lambda index: index),)))
