"""Products of quantized operands, and what they become."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.integer_products import integer_product
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
    MatMulOp,
    ReduceOp,
    Value,
    domain_vars,
)
from torch_hybrid_backend.loops.quantized import bounded, is_dequantized

ROWS, DEPTHS = Buffer((4,), "float32"), Buffer((8,), "float32")


def as_float(e: Expr) -> Expr:
    return ops.cast(e, "float32")


def number(value: float) -> Expr:
    return ops.const(value, "float32")


def dequantized(buffer: Buffer, scale: Callable[[tuple[Index, ...]], Expr], zero: float = 0) -> Map:
    def at(index: tuple[Index, ...]) -> Expr:
        return ops.mul(ops.sub(as_float(buffer.at(index)), number(zero)), scale(index))

    return Map(buffer.shape, "float32", at, ((buffer, lambda index: index),))


def realize_nothing(value: Value) -> Value:
    raise AssertionError(f"{value} is in memory already")


def product_of(a: Value, b: Value) -> tuple[LoopOp, ...] | None:
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return integer_product(MatMulOp(Buffer(shape, "float32"), a, b), realize_nothing)


def test_a_matmul_of_quantized_operands_is_one_of_integers() -> None:
    """Its operands are the buffers of integers; scales by row and column come behind it, and so does a zero point."""
    a, b = Buffer((1, 4, 8), "uint8"), Buffer((1, 8, 6), "int8", constant=True)
    rows, columns = Buffer((4,), "float32"), Buffer((6,), "float32", constant=True)
    found = product_of(dequantized(a, lambda i: rows.at(i[1:2]), 7), dequantized(b, lambda i: columns.at(i[2:])))
    assert found is not None
    product, scaled = found
    assert isinstance(product, IntegerMatMulOp)
    assert (product.a, product.b, product.out.dtype) == (a, b, "int32")
    assert product.zero is not None
    zero = product.zero(domain_vars((1, 4)))
    assert isinstance(zero, Const)
    assert zero.value == 7
    assert set(scaled.reads()) == {product.out, rows, columns}


@pytest.mark.parametrize(("low", "high"), [(-64, 64), (-8, 7)])
def test_clamped_constants_stay_clamped(low: int, high: int) -> None:
    """A clamp of constants is part of the product's operand, which packing sees through and does; without one it is their buffer."""
    a, b = Buffer((1, 4, 8), "uint8"), Buffer((1, 8, 6), "int8", constant=True)

    def clamped(index: tuple[Index, ...]) -> Expr:
        inside = ops.call("min", ops.call("max", b.at(index), ops.const(low, "int8")), ops.const(high, "int8"))
        return ops.mul(as_float(inside), number(0.5))

    weight = Map(b.shape, "float32", clamped, ((b, lambda index: index),))
    left = dequantized(a, lambda i: number(0.5))
    for right, bounds in ((weight, (low, high)), (dequantized(b, lambda i: number(0.5)), (-128, 127))):
        found = product_of(left, right)
        assert found is not None
        product = found[0]
        assert isinstance(product, IntegerMatMulOp)
        read, between = bounded(product.b.at(index := domain_vars(b.shape)))
        assert isinstance(read, Load)
        assert (read.buffer, read.index, between) == (b, index, bounds)
        assert (product.b is b) == (bounds == (-128, 127))


def test_scales_along_the_sum_make_no_integer_product() -> None:
    """Nor does a right operand that nobody quantized; one that is made in the call does."""
    a, b = Buffer((1, 4, 8), "int8"), Buffer((1, 8, 6), "int8", constant=True)
    one = number(0.5)
    left, right = dequantized(a, lambda i: one), dequantized(b, lambda i: one)
    assert product_of(left, right) is not None
    assert product_of(dequantized(a, lambda i: DEPTHS.at(i[2:])), right) is None
    assert product_of(left, dequantized(b, lambda i: DEPTHS.at(i[1:2]))) is None
    assert product_of(left, dequantized(Buffer(b.shape, "int8"), lambda i: one)) is not None
    assert product_of(left, Buffer(b.shape, "float32", constant=True)) is None


def test_a_zero_point_of_the_right_operand_is_taken_off_by_sums_of_rows() -> None:
    """Zero points are taken off where int32 holds all that is computed: not of many numbers, nor of zero points that may be large. A
    convolution's stays."""
    one = number(0.5)
    a, b = Buffer((1, 4, 8), "uint8"), Buffer((1, 8, 6), "uint8")
    found = product_of(dequantized(a, lambda i: one, 7), dequantized(b, lambda i: one, 3))
    assert found is not None
    rows, product, scaled = found
    assert isinstance(rows, ReduceOp)
    assert isinstance(product, IntegerMatMulOp)
    assert (rows.reads(), rows.out.shape, rows.out.dtype) == ([a], (1, 4), "int32")
    assert set(scaled.reads()) == {product.out, rows.out}

    def is_one(depth: int, zero: Callable[[tuple[Index, ...]], Expr]) -> bool:
        left, right = Buffer((1, 4, depth), "uint8"), Buffer((1, depth, 6), "uint8")

        def at(index: tuple[Index, ...]) -> Expr:
            return ops.mul(ops.sub(as_float(right.at(index)), zero(index[2:])), one)

        return (
            product_of(dequantized(left, lambda i: one), Map(right.shape, "float32", at, ((right, lambda i: i),)))
            is not None
        )

    assert is_one((1 << 31) // 255**2, lambda i: number(255))
    assert not is_one((1 << 31) // 255**2 + 1, lambda i: number(255))
    narrow, wide = Buffer((6,), "uint8"), Buffer((6,), "int64")
    assert is_one(64, lambda i: as_float(narrow.at(i)))
    assert not is_one(64, lambda i: as_float(wide.at(i)))

    x, w = Buffer((1, 8, 5, 5), "uint8"), Buffer((6, 8, 3, 3), "int8", constant=True)
    image, weight = dequantized(x, lambda i: one), dequantized(w, lambda i: one, 3)
    op = ConvOp(Buffer((1, 6, 3, 3), "float32"), image, weight, (1, 1), (0, 0), (1, 1), 1)
    assert integer_product(op, realize_nothing) is None


@pytest.mark.parametrize(
    ("dtype", "zero", "bounds", "depth"),
    [
        ("int8", 0, None, (1 << 31) // 128**2 - 1),  # -128 by itself: 2^31 is one too many
        ("uint8", 0, None, (1 << 31) // (255 * 128)),
        ("uint8", 128, None, (1 << 31) // 128**2 - 1),
        ("uint8", 0, (-64, 64), (1 << 31) // (255 * 64)),
        ("int8", -128, (-127, 127), (1 << 31) // (255 * 127)),
    ],
)
def test_sums_are_as_long_as_int32_holds(dtype: str, zero: int, bounds: tuple[int, int] | None, depth: int) -> None:
    """Whatever the numbers are between the bounds that the graph names. Of a zero point that leaves more, float64 has the corrected sums."""

    def of_depth(k: int) -> LoopOp | None:
        a, b = Buffer((1, 4, k), dtype), Buffer((1, k, 6), "int8", constant=True)

        def weight(index: tuple[Index, ...]) -> Expr:
            e = b.at(index)
            if bounds is not None:
                e = ops.call("min", ops.call("max", e, ops.const(bounds[0], "int8")), ops.const(bounds[1], "int8"))
            return ops.mul(as_float(e), number(0.5))

        right = Map(b.shape, "float32", weight, ((b, lambda index: index),))
        found = product_of(dequantized(a, lambda i: number(0.5), zero), right)
        return None if found is None else found[0]

    longest, beyond = of_depth(depth), of_depth(depth + 1)
    assert longest is not None
    assert longest.out.dtype == "int32"
    assert beyond is None or beyond.out.dtype == "float64"
    assert of_depth(200_000) is None


def test_sums_with_a_zero_point_that_may_be_large_are_of_float64() -> None:
    """Sums are of float64 where int32 may not hold them; a zero point of 8 bits, clamped or cast so, is small, and none that is no int32 makes
    integers."""
    a, b = Buffer((1, 4, 64), "uint8"), Buffer((1, 64, 6), "int8", constant=True)
    narrow, wide, long = Buffer((4,), "int8"), Buffer((4,), "int32"), Buffer((4,), "int64")

    def sums(zero: Callable[[tuple[Index, ...]], Expr]) -> str | None:
        def at(index: tuple[Index, ...]) -> Expr:
            return ops.mul(ops.sub(as_float(a.at(index)), as_float(zero(index[1:2]))), number(0.5))

        rows = Map(a.shape, "float32", at, ((a, lambda index: index),))
        found = product_of(rows, dequantized(b, lambda i: number(0.5)))
        return None if found is None else found[0].out.dtype

    def clamped(index: tuple[Index, ...]) -> Expr:
        return ops.call("min", ops.call("max", wide.at(index), ops.const(0, "int32")), ops.const(255, "int32"))

    small = (narrow.at, clamped, lambda i: ops.cast(clamped(i), "int64"), lambda i: ops.cast(long.at(i), "uint8"))
    assert [sums(zero) for zero in (*small, lambda i: number(1000))] == ["int32"] * 5
    assert [sums(zero) for zero in (wide.at, long.at, lambda i: number(1e6))] == ["float64"] * 3
    assert sums(lambda i: number(1e10)) is None
    assert sums(ROWS.at) is None


def test_a_convolution_of_quantized_operands_is_one_of_integers() -> None:
    """With the input's zero point, which must be known, and a number that the input may have."""
    x, w = Buffer((1, 8, 5, 5), "uint8"), Buffer((6, 8, 3, 3), "int8", constant=True)
    scales = Buffer((6,), "float32", constant=True)
    out = Buffer((1, 6, 3, 3), "float32")
    places = (1, 1), (0, 0), (1, 1), 1
    image, weight = dequantized(x, lambda i: number(0.5), 9), dequantized(w, lambda i: scales.at(i[:1]))
    found = integer_product(ConvOp(out, image, weight, *places), realize_nothing)
    assert found is not None
    product, scaled = found
    assert isinstance(product, IntegerConvOp)
    assert (product.x, product.w, product.zero) == (x, w, 9)
    assert scaled.out is out
    by_channel = dequantized(x, lambda i: DEPTHS.at(i[1:2]))
    assert integer_product(ConvOp(out, by_channel, weight, *places), realize_nothing) is None
    signed = Buffer(x.shape, "int8")
    for source, zero, is_one in (
        (x, 255, True),
        (x, 256, False),
        (x, -1, False),
        (signed, -128, True),
        (signed, 128, False),
    ):
        convolution = ConvOp(out, dequantized(source, lambda i: number(0.5), zero), weight, *places)
        assert (integer_product(convolution, realize_nothing) is not None) == is_one


def test_a_quantized_value_that_is_computed_is_given_memory() -> None:
    """The value of 8 bits itself, so that all who read it find the same buffer."""
    source = Buffer((1, 4, 8), "float32")
    narrow = Map((1, 4, 8), "int8", lambda i: ops.cast(source.at(i), "int8"), ((source, lambda i: i),))
    wide = Map((1, 4, 8), "float32", lambda i: ops.mul(as_float(narrow.at(i)), number(2)), ((narrow, lambda i: i),))
    b = Buffer((1, 8, 6), "int8", constant=True)
    made: list[Buffer] = []

    def realize(value: Value) -> Value:
        assert value is narrow
        made.append(Buffer(value.shape, value.dtype))
        narrow.realize(made[-1])
        return made[-1]

    op = MatMulOp(Buffer((1, 4, 6), "float32"), wide, dequantized(b, lambda i: number(2)))
    found = integer_product(op, realize)
    assert found is not None
    assert isinstance(found[0], MatMulOp)
    assert found[0].a is made[0]
    assert is_dequantized(wide)
    assert not is_dequantized(narrow)
    assert not is_dequantized(source)
