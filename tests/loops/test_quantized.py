"""Forms of quantized scalars and operands: each that is recognized, and what only looks alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, Load, Map, QuantizedOperand, Value, domain_vars
from torch_hybrid_backend.loops.lowerings.indexing import bounded as index_within
from torch_hybrid_backend.loops.quantized import (
    affine,
    bounded,
    codebook_element,
    is_dequantized,
    is_from_codebook,
    long_integers,
    quantized_operand,
)

X, ROWS = Buffer((4, 8), "uint8"), Buffer((4,), "float32")
POINT = domain_vars((4, 8))
_I = index_of(LoopVar("i", 64))


def as_float(e: Expr) -> Expr:
    return ops.cast(e, "float32")


def number(value: float) -> Expr:
    return ops.const(value, "float32")


@pytest.mark.parametrize(
    ("expr", "zero", "scales"),
    [
        (X.at(POINT), None, 0),
        (as_float(X.at(POINT)), None, 0),
        (ops.mul(as_float(X.at(POINT)), number(0.5)), None, 1),
        (ops.mul(number(0.5), ops.sub(as_float(X.at(POINT)), number(3))), 3, 1),
        (ops.mul(as_float(ops.sub(ops.cast(X.at(POINT), "int32"), ops.const(3, "int32"))), ROWS.at(POINT[:1])), 3, 1),
        (ops.mul(ops.mul(as_float(X.at(POINT)), number(2)), ROWS.at(POINT[:1])), None, 2),
        (ops.round_to(ops.mul(as_float(X.at(POINT)), number(2)), "bfloat16"), None, 1),
        (ops.mul(ops.sub(as_float(X.at(POINT)), number(0)), number(2)), None, 1),
    ],
)
def test_an_affine_scalar_is_an_integer_moved_and_scaled(expr: Expr, zero: int | None, scales: int) -> None:
    """In whatever way it is spelled; a zero point of 0 is none."""
    found = affine(expr)
    assert found is not None
    assert isinstance(found.integer, Load)
    assert found.integer.buffer is X
    assert (found.zero.value if isinstance(found.zero, Const) else found.zero) == zero
    assert len(found.scales) == scales


@pytest.mark.parametrize(
    "expr",
    [
        ROWS.at(POINT[:1]),
        ops.sub(as_float(X.at(POINT)), number(0.5)),  # no whole zero point
        ops.sub(ops.mul(as_float(X.at(POINT)), number(2)), number(3)),  # moved after it was scaled
        ops.cast(ops.mul(as_float(X.at(POINT)), number(0.5)), "int32"),  # cut off
        ops.add(as_float(X.at(POINT)), number(1)),
        ops.cast(X.at(POINT), "bool"),
    ],
)
def test_other_scalars_are_not_affine(expr: Expr) -> None:
    """A scalar that an integer product could not give exactly stays a product of floats."""
    assert affine(expr) is None


def test_a_clamp_to_no_number_stays() -> None:
    """The winner of two bounds that leave no number between them depends on their order."""
    b = Buffer((4,), "int8", constant=True)
    load = b.at(domain_vars(b.shape))
    above = ops.call("max", load, ops.const(9, "int8"))
    never = ops.call("min", above, ops.const(3, "int8"))
    assert bounded(above) == (load, (9, 127))
    assert bounded(never) == (above, (-128, 3))


def element(
    size: int = 16,
    dtype: str = "uint8",
    *,
    table_is_constant: bool = True,
    indices_are: bool = True,
    wrap: bool = False,
) -> tuple[Load, Buffer, Buffer]:
    """table[indices[i]], as lowerings write it."""
    table, indices = (
        Buffer((size,), "float32", "table", constant=table_is_constant),
        Buffer((64,), dtype, "indices", constant=indices_are),
    )
    place = index_within(ops.cast(indices.at((_I,)), "int32"), size, wrap=wrap)
    return Load("float32", table, (place,)), table, indices


@pytest.mark.parametrize("size", [2, 11, 16])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_elements_of_a_table(size: int, dtype: str) -> None:
    """Tables have up to 16 values, and indices 8 bits, seen through the cast and the bounds of the table."""
    e, table, indices = element(size, dtype)
    found = codebook_element(e)
    assert found is not None
    assert (found.table, found.bounds) == (table, (0, size - 1))
    index, _ = bounded(found.integer)
    assert isinstance(index, Load)
    assert (index.buffer, index.index) == (indices, (_I,))


def test_what_is_no_element_of_a_codebook() -> None:
    """Larger tables, wider indices, what changes from call to call, indices that wrap, and what is read without a table."""
    others = [
        element(17),
        element(16, "int32"),
        element(table_is_constant=False),
        element(indices_are=False),
        element(wrap=True),
    ]
    assert not any(codebook_element(e) for e, _, _ in others)
    plain = Buffer((64,), "float32", "plain", constant=True)
    assert codebook_element(plain.at((_I,))) is None
    assert not is_from_codebook(plain)


def test_values_from_a_codebook() -> None:
    """A value is from a codebook if its elements are."""
    e, _, _ = element()
    assert is_from_codebook(Map((64,), "float32", lambda _: e))


def test_integers_that_are_long_to_compute_are_found() -> None:
    """Those of a concatenation of several tensors, which get memory; not those in memory, and not where scaling is the long part."""
    tensors = [Buffer((4, 8), "uint8") for _ in range(8)]

    def joined(index: tuple[Index, ...]) -> Expr:
        row, column = index
        found = tensors[0].at((row, column))
        for number, tensor in enumerate(tensors[1:], 1):
            found = ops.where(ops.index_in(column, 0, number), found, tensor.at((row, column)))
        return found

    def scaled(integers: Value, steps: int = 1) -> Map:
        def at(index: tuple[Index, ...]) -> Expr:
            scale = ROWS.at(index[:1])
            for _ in range(steps):
                scale = ops.call("max", ops.mul(scale, number(0.5)), number(1))
            return ops.mul(as_float(integers.at(index)), scale)

        return Map((4, 8), "float32", at, ((integers, lambda index: index),))

    narrow = Map((4, 8), "uint8", joined, tuple((tensor, lambda index: index) for tensor in tensors))
    assert long_integers(scaled(narrow)) is narrow
    assert long_integers(scaled(narrow, steps=20)) is None
    assert long_integers(narrow) is None
    assert long_integers(scaled(tensors[0])) is None


def test_what_is_scaled_by_long_work_is_no_dequantized_value() -> None:
    """A mask times an activation, say: it is kept where several read it, as any computed value is."""
    mask, x = Buffer((4, 8), "uint8"), Buffer((4, 8), "float32")

    def masked(calls: int) -> Map:
        def at(index: tuple[Index, ...]) -> Expr:
            value = x.at(index)
            for _ in range(calls):
                value = ops.call("exp", value)
            return ops.mul(as_float(mask.at(index)), value)

        return Map((4, 8), "float32", at)

    assert is_dequantized(masked(2))
    assert not is_dequantized(masked(20))


def test_a_zero_point_that_wraps_is_taken_as_it_is() -> None:
    """A cast between integers changes numbers that do not fit; only the one to a float is looked through."""
    wide = Buffer((), "int32")
    wrapped = ops.cast(wide.at(()), "uint8")
    found = affine(ops.sub(as_float(X.at(POINT)), as_float(wrapped)))
    assert found is not None
    assert isinstance(found.zero, Call)
    assert found.zero.args == (wrapped,)


K, N = 96, 70


def constant(shape: tuple[int, ...], dtype: str) -> Buffer:
    return Buffer(shape, dtype, constant=True)


Q, U = constant((K, N), "int8"), constant((K, N), "uint8")
COLUMNS, GROUPS, HALVES = constant((N,), "float32"), constant((3, N), "float32"), constant((3, N), "bfloat16")
ZEROS, TWO, DEPTHS = constant((3, N), "int8"), constant((2, N), "float32"), constant((K,), "float32")
TABLE, PLAIN = constant((11,), "float32"), constant((K, N), "float32")


def value_of(element: Callable[[Index, Index], Expr]) -> Map:
    """A matmul's right operand, (1, K, N)."""
    return Map((1, K, N), "float32", lambda i: element(i[1], i[2]))


def read(buffer: Buffer, k: Index, n: Index) -> Expr:
    return as_float(buffer.at((k, n)))


def clamped(buffer: Buffer, low: int, high: int, k: Index, n: Index) -> Expr:
    inside = ops.call("max", buffer.at((k, n)), ops.literal(low, buffer.dtype))
    return as_float(ops.call("min", inside, ops.literal(high, buffer.dtype)))


def scaled(integers: Expr, scales: Buffer, k: Index, n: Index) -> Expr:
    return ops.mul(integers, as_float(scales.at((k // 32, n))))


def looked_up(k: Index, n: Index) -> Expr:
    return TABLE.at((index_within(ops.cast(U.at((k, n)), "int32"), 11, wrap=False),))


# what -> the element, and (bits, group, scales, zero points, has a table)
OPERANDS: dict[str, tuple[Callable[[Index, Index], Expr], tuple[int, int, object, object, bool]]] = {
    "cast": (lambda k, n: read(Q, k, n), (8, K, 1.0, 0.0, False)),
    "one scale": (lambda k, n: ops.mul(number(0.5), read(U, k, n)), (8, K, 0.5, 0.0, False)),
    "columns": (lambda k, n: ops.mul(read(Q, k, n), COLUMNS.at((n,))), (8, K, "float32", 0.0, False)),
    "groups": (lambda k, n: scaled(read(Q, k, n), GROUPS, k, n), (8, 32, "float32", 0.0, False)),
    "scales of bfloat16": (lambda k, n: scaled(read(Q, k, n), HALVES, k, n), (8, 32, "bfloat16", 0.0, False)),
    "4 bits": (lambda k, n: scaled(clamped(Q, -8, 7, k, n), GROUPS, k, n), (4, 32, "float32", 0.0, False)),
    "4 bits without signs": (
        lambda k, n: scaled(clamped(U, 0, 15, k, n), GROUPS, k, n),
        (4, 32, "float32", 0.0, False),
    ),
    "7 bits": (lambda k, n: ops.mul(clamped(Q, -64, 64, k, n), number(2)), (8, K, 2.0, 0.0, False)),
    "one zero point": (
        lambda k, n: scaled(ops.sub(clamped(U, 0, 15, k, n), number(8)), GROUPS, k, n),
        (4, 32, "float32", 8.0, False),
    ),
    "zero points of groups": (
        lambda k, n: scaled(ops.sub(read(Q, k, n), as_float(ZEROS.at((k // 32, n)))), GROUPS, k, n),
        (8, 32, "float32", "int8", False),
    ),
    "rounded": (
        lambda k, n: ops.round_to(scaled(read(Q, k, n), HALVES, k, n), "bfloat16"),
        (8, 32, "bfloat16", 0.0, False),
    ),
    "codebook": (looked_up, (4, K, 1.0, 0.0, True)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_quantized_operands(name: str) -> None:
    """Integers, bits, scales, zero points, group and table of every form of weights that is recognized."""
    element, (bits, group, scales, zero_points, has_table) = OPERANDS[name]
    found = quantized_operand(value_of(element))
    assert isinstance(found, QuantizedOperand)
    assert (found.bits, found.group, found.table) == (bits, group, TABLE if has_table else None)
    assert found.integers.shape == (1, K, N)
    for part, expected in ((found.scales, scales), (found.zero_points, zero_points)):
        if isinstance(part, Value):
            assert (part.shape, part.dtype) == ((1, K // group, N), expected)
            assert isinstance(part.at(domain_vars(part.shape)), Load)
        else:
            assert part == expected
    integer, bounds = bounded(found.integers.at(domain_vars((1, K, N))))
    assert isinstance(integer, Load)
    assert (integer.buffer in (Q, U), bounds) == (True, found.bounds)


OTHERS: dict[str, Value] = {
    "floats in memory": constant((1, K, N), "float32"),
    "integers in memory": constant((1, K, N), "int8"),
    "floats": value_of(lambda k, n: PLAIN.at((k, n))),
    "scales of k": value_of(lambda k, n: ops.mul(read(Q, k, n), DEPTHS.at((k,)))),
    "a scale for each": value_of(lambda k, n: ops.mul(read(Q, k, n), PLAIN.at((k, n)))),
    "two sizes of groups": value_of(
        lambda k, n: scaled(ops.sub(read(Q, k, n), as_float(ZEROS.at((k // 48, n)))), GROUPS, k, n)
    ),
    "no whole groups": value_of(lambda k, n: ops.mul(read(Q, k, n), TWO.at((k // 64, n)))),
    "two scales": value_of(lambda k, n: ops.mul(ops.mul(read(Q, k, n), COLUMNS.at((n,))), number(0.5))),
    "a scale that is computed": value_of(lambda k, n: ops.mul(read(Q, k, n), ops.call("exp", COLUMNS.at((n,))))),
    "integers of the call": value_of(lambda k, n: read(Buffer((K, N), "int8"), k, n)),
    "scales of the call": value_of(lambda k, n: ops.mul(read(Q, k, n), Buffer((N,), "float32").at((n,)))),
    "several matrices": Map((2, K, N), "float32", lambda i: read(Q, i[1], i[2])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_quantized_operand(name: str) -> None:
    """Operands that are in memory, change from call to call, or whose scales are of no whole groups along k."""
    assert quantized_operand(OTHERS[name]) is None
