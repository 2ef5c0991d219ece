"""The scalar language's values: what reading them yields, what they read, and which element each of theirs stands for."""

from __future__ import annotations

import itertools

import pytest
import torch

from loops.interpret import check_inverse, evaluate
from torch_hybrid_backend.loops.attention_scores import SdpaScore
from torch_hybrid_backend.loops.index import as_index, var
from torch_hybrid_backend.loops.ir import (
    AttentionOp,
    Buffer,
    Call,
    ConvOp,
    Expr,
    FromIndex,
    Load,
    LoopOp,
    Map,
    MapOp,
    MatMulOp,
    ReduceOp,
    Value,
    buffers_of,
    buffers_of_expr,
    compute_dtype,
    count_calls,
    depth,
    domain_vars,
    loads_of,
    parts,
    post_order,
    scalar_index,
)
from torch_hybrid_backend.loops.lowering import reindex
from torch_hybrid_backend.loops.ops import add, call, cast, const, from_index, mul, round_to


def _buffer(name: str, *shape: int, dtype: str = "float32") -> Buffer:
    return Buffer(shape, dtype, name)


def _doubled(source: Value) -> Map:
    """source + source, element by element."""

    def at(index):
        element = source.at(index)
        return add(element, element)

    return Map(source.shape, source.dtype, at, ((source, lambda index: index),))


def _transposed(source: Value) -> Map:
    """A view of a matrix."""

    def swap(index):
        return index[1], index[0]

    rows, columns = source.shape
    return Map((columns, rows), source.dtype, lambda index: source.at(swap(index)), ((source, swap),), base=source)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int8", "bool"])
def test_half_types_are_computed_in_float32(dtype: str) -> None:
    """Loads widen them; every other type is computed in itself."""
    expected = "float32" if dtype in ("bfloat16", "float16") else dtype
    assert compute_dtype(dtype) == _buffer("x", 4, dtype=dtype).at((var("i", 4),)).dtype == expected


def test_an_element_is_described_once() -> None:
    """`x + x` reads x once, however deep the chain: the expression grows with its length, not as a power of two."""
    value: Value = _buffer("x", 4)
    for _ in range(200):
        value = _doubled(value)
    expr = value.at(domain_vars((4,)))
    assert len(list(parts([expr]))) == 201
    assert count_calls(expr) == 200
    assert len(loads_of(expr)) == 1
    # Another element is another expression.
    assert {load.index for load in loads_of(value.at((as_index(2),)))} == {(as_index(2),)}


def test_a_realised_value_is_read_from_memory() -> None:
    """By all its readers, views and those that were described before included."""
    x, y = _buffer("x", 2, 3), _buffer("y", 2, 3)
    doubled = _doubled(x)
    view = _transposed(doubled)
    reader = _doubled(view)
    index = domain_vars((3, 2))
    assert buffers_of_expr(reader.at(index)) == [x]
    doubled.realize(y)
    assert buffers_of_expr(reader.at(index)) == [y]
    (load,) = loads_of(reader.at(index))
    assert load.index == (index[1], index[0])
    assert buffers_of(view) == buffers_of(doubled) == [y]
    assert list(reader.inverse) == [y]


def test_inverses_go_through_views_and_to_every_source() -> None:
    """Each buffer that a value reads element by element is named, with the value's element that each of its own stands for."""
    x, w = _buffer("x", 2, 3), _buffer("w", 3, 2)
    left, right = _transposed(_doubled(x)), _doubled(w)
    total = Map(
        (3, 2),
        "float32",
        lambda index: add(left.at(index), right.at(index)),
        ((left, lambda index: index), (right, lambda index: index)),
    )
    assert set(total.inverse) == {x, w}
    index = domain_vars((2, 3))
    assert total.inverse[x](index) == (index[1], index[0])
    check_inverse(total, {x: torch.randn(2, 3), w: torch.randn(3, 2)})
    shifted = reindex(x, (2, 2), lambda index: (index[0], index[1] + 1))
    assert not shifted.inverse  # a part of x: not every element of x stands for one


def test_operations_name_what_they_read_once() -> None:
    """In the order of first use, through views and values not in memory, and inside indices."""
    q, k, v, mask, x, rows = (_buffer(name, 2, 2, 2, 2) for name in ("q", "k", "v", "mask", "x", "rows"))
    out = _buffer("out", 2, 2, 2, 2)
    looked_up = Map(
        x.shape, "float32", lambda index: x.at((scalar_index(cast(rows.at(index), "int64"), 0, 1), *index[1:]))
    )
    ops: list[tuple[LoopOp, list[Buffer]]] = [
        (MapOp(out, add_of(q, add_of(k, q))), [q, k]),
        (MapOp(out, looked_up), [x, rows]),
        (MatMulOp(out, _doubled(q), q), [q]),
        (ConvOp(out, k, _doubled(q), (1, 1), (0, 0), (1, 1), 1), [k, q]),
        (AttentionOp(out, q=q, k=k, v=v, score=SdpaScore(scale=1.0)), [q, k, v]),
        (AttentionOp(out, q=q, k=q, v=v, score=SdpaScore(scale=1.0, causal=True, mask=mask)), [q, v, mask]),
        (ReduceOp(out, (2, 2, 2, 2, 2), (4,), "sum", lambda index: mul(v.at(index[:4]), q.at(index[1:]))), [v, q]),
    ]
    for op, expected in ops:
        assert op.reads() == expected


def add_of(a: Value, b: Value) -> Map:
    return Map(a.shape, a.dtype, lambda index: add(a.at(index), b.at(index)))


def test_a_reduction_keeps_the_other_axes() -> None:
    """In their order, whatever the order in which axes are reduced; the result has their sizes."""
    x, out = _buffer("x", 2, 3, 4), _buffer("out", 3)
    op = ReduceOp(out, x.shape, (0, 2), "sum", x.at)
    assert op.kept == (1,)
    env = {x: torch.arange(24.0).reshape(2, 3, 4)}
    evaluate(op, env)
    assert torch.equal(env[out], env[x].sum((0, 2)))


def test_casts_are_no_work() -> None:
    """Work is arithmetic: casts and roundings are left out, a shared part counts once."""
    i = (var("i", 4),)
    x = _buffer("x", 4, dtype="bfloat16").at(i)
    once = add(x, const(1, "float32"))
    assert count_calls(x) == 0
    assert count_calls(round_to(cast(once, "float32"), "bfloat16")) == 1
    assert count_calls(mul(once, once)) == 2


def test_parts_come_in_the_order_of_first_use() -> None:
    """Each once, and those inside indices only where they are asked for."""
    i, (x, rows) = var("i", 4), (_buffer("x", 9), _buffer("rows", 4, dtype="int64"))
    row = rows.at((i,))
    read = x.at((scalar_index(row, 0, 7) // 2 + i,))
    expr = add(read, mul(read, const(2, "float32")))
    assert isinstance(expr, Call)
    assert next(iter(parts([expr]))) is expr
    assert [type(part) for part in parts([expr])].count(Load) == 1
    assert set(loads_of(expr)) == {read, row}
    assert row not in set(parts([expr]))
    assert buffers_of_expr(expr) == [x, rows]
    every = list(parts([expr, read, expr], within_indices=True))
    assert len(every) == len(set(every)) == 5


def test_scalars_become_indices() -> None:
    """A literal and an index are themselves; what is read has the range that it was given."""
    i = var("i", 4)
    assert scalar_index(const(3, "int64"), 0, 9) == as_index(3)
    assert scalar_index(from_index(i * 2), 0, 9) == i * 2
    assert isinstance(from_index(i), FromIndex)
    index = scalar_index(_buffer("rows", 4, dtype="int64").at((i,)), 0, 9)
    assert (index.low, index.high) == (0, 9)
    assert ((index * 3 + 1).low, (index * 3 + 1).high) == (1, 28)


def test_what_says_nothing_is_an_error() -> None:
    """A value without elements, and an operation that does not say what it reads, name themselves."""
    with pytest.raises(TypeError, match="Value has no elements"):
        Value((2,), "float32").at((as_index(0),))
    with pytest.raises(TypeError, match="LoopOp does not say"):
        LoopOp(_buffer("out", 2)).reads()


def test_buffers_are_themselves() -> None:
    """Two buffers of equal form are two, and are numbered apart."""
    made = [_buffer("x", 2) for _ in range(3)]
    assert len(set(made)) == len({buffer.number for buffer in made}) == 3
    for a, b in itertools.combinations(made, 2):
        assert a != b
    expr: Expr = call("neg", made[0].at((as_index(0),)))
    assert buffers_of_expr(expr) == [made[0]]


def test_how_deep_an_expression_is() -> None:
    """The longest way counts; each part comes once, after its arguments; 10,000 operations are no deeper recursion than one."""
    x = _buffer("x", 2).at((as_index(0),))
    expr: Expr = add(call("neg", call("neg", x)), x)
    assert depth(expr) == 3
    assert depth(expr, lambda load: 4) == 7
    order = list(post_order(expr))
    assert order[0] is x
    assert order[-1] is expr
    assert len(order) == len(set(order)) == 4
    for _ in range(10_000):
        expr = call("neg", expr)
    assert depth(expr) == 10_003
