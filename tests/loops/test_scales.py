"""Factors of integer sums: what becomes one, what stays, and that values are the same."""

from __future__ import annotations

import pytest
import torch

from tests.loops.interpret import Frame
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Call, Expr, Load, parts
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.loops.scales import depends_on_column_alone, gathered

ROW, COLUMN = LoopVar("row", 5), LoopVar("column", 7)
POINT = (index_of(ROW), index_of(COLUMN))
SUMS = Buffer((5, 7), "int32", "sums")
RESIDUAL, OUT = Buffer((5, 7), "int8", "residual"), Buffer((5, 7), "float32", "out")
SCALES, FACTOR, SHIFT = (Buffer((7,), "float32", name) for name in ("scales", "factor", "shift"))
OF_ROWS = Buffer((5,), "float32", "of_rows")


def number(value: float) -> Expr:
    return ops.const(value, "float32")


def of_column(buffer: Buffer) -> Expr:
    return buffer.at((POINT[1],))


def dequantized() -> Expr:
    """A sum times both scales, as a batch norm leaves it."""
    scaled = ops.mul(ops.mul(ops.cast(SUMS.at(POINT), "float32"), number(0.03)), of_column(SCALES))
    return ops.add(ops.mul(scaled, of_column(FACTOR)), of_column(SHIFT))


def relu6(e: Expr) -> Expr:
    return ops.call("min", ops.call("max", e, number(0.0)), number(6.0))


def residual() -> Expr:
    return ops.mul(ops.cast(RESIDUAL.at(POINT), "float32"), number(0.5))


def values(e: Expr) -> torch.Tensor:
    torch.manual_seed(0)
    env = {
        SUMS: torch.randint(-(10**5), 10**5, (5, 7), dtype=torch.int32),
        RESIDUAL: torch.randint(-128, 128, (5, 7)).to(torch.int8),
        **{buffer: torch.randn(buffer.shape) for buffer in (SCALES, FACTOR, SHIFT, OF_ROWS)},
    }
    return Frame((5, 7), env, (ROW, COLUMN)).expr(e, None)


def rewritten(e: Expr, sums: Buffer = SUMS) -> Expr:
    (store,) = gathered([Store(OUT, POINT, e)], sums, COLUMN)
    return store.value


def operations(e: Expr) -> list[str]:
    """The operations computed for every element: not from the column alone."""
    return sorted(p.op for p in parts([e]) if isinstance(p, Call) and not depends_on_column_alone(p, COLUMN))


@pytest.mark.parametrize(
    ("e", "left"),
    [
        (dequantized(), ["add", "cast", "mul"]),
        (ops.mul(relu6(dequantized()), number(40.0)), ["add", "cast", "max", "min", "mul"]),
        (ops.mul(number(40.0), dequantized()), ["add", "cast", "mul"]),
        (
            ops.mul(ops.call("max", ops.add(dequantized(), residual()), number(0.0)), number(40.0)),
            ["add", "add", "cast", "cast", "max", "mul", "mul"],
        ),
        # A factor that may be negative stays behind a maximum; one of the rows, and another function, are not passed.
        (ops.mul(relu6(dequantized()), of_column(FACTOR)), ["add", "cast", "max", "min", "mul", "mul"]),
        (ops.mul(ops.call("max", dequantized(), number(0.0)), number(-2.0)), ["add", "cast", "max", "mul", "mul"]),
        (
            ops.mul(ops.mul(ops.cast(SUMS.at(POINT), "float32"), OF_ROWS.at((POINT[0],))), number(2.0)),
            ["cast", "mul", "mul"],
        ),
        (ops.mul(ops.call("tanh", dequantized()), number(40.0)), ["add", "cast", "mul", "mul", "tanh"]),
    ],
    ids=["batch norm", "requantized", "literal first", "residual", "column", "negative", "rows", "tanh"],
)
def test_factors_are_one(e: Expr, left: list[str]) -> None:
    """For each element one product and one sum is left of a chain, and values are those of float32 but for roundings."""
    found = rewritten(e)
    assert operations(found) == left
    torch.testing.assert_close(values(found), values(e), rtol=1e-5, atol=1e-4)


def test_sums_of_floats_stay_as_they_are() -> None:
    """Their products are rounded in the order in which the graph says."""
    floats = Buffer((5, 7), "float32", "sums")
    e = ops.mul(ops.mul(floats.at(POINT), number(0.1)), number(3.0))
    assert rewritten(e, floats) is e


def test_what_depends_on_the_column_alone() -> None:
    """Literals, the column's number, and loads by it; none by the row, nor by a part of the column's number."""
    assert depends_on_column_alone(ops.mul(number(2.0), of_column(SCALES)), COLUMN)
    assert depends_on_column_alone(ops.from_index(POINT[1]), COLUMN)
    assert not depends_on_column_alone(ops.from_index(POINT[0]), COLUMN)
    assert not depends_on_column_alone(residual(), COLUMN)
    halved = Load("float32", SCALES, (POINT[1] // 2,))
    assert not depends_on_column_alone(halved, COLUMN)
