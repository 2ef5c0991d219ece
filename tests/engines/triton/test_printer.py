"""Expressions as lines."""

from __future__ import annotations

from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value, literal
from torch_hybrid_backend.engines.triton.source import Lines
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import contiguous

_I, _J = LoopVar("i", 8), LoopVar("j", 16)
_TILE = Tile(("ROWS", "COLUMNS"))


def _printer(*buffers: Buffer) -> Printer:
    printer = Printer(Lines(), [Argument(b, contiguous(b.shape)) for b in buffers], [], {})
    printer.variable(_I, Value.along("i", 0))
    printer.variable(_J, Value.along("j", 1))
    return printer


def test_equal_parts_are_printed_once() -> None:
    """Also where they are different objects."""
    x = Buffer((8, 16), "float32")
    printer = _printer(x)
    with printer.over(_TILE, {_I: index_of(_I), _J: index_of(_J)}, {}):
        one, two = (ops.mul(x.at((index_of(_I), index_of(_J))), ops.const(2.0, "float32")) for _ in range(2))
        assert printer.expr(ops.add(one, two)).dims == {0, 1}
    assert printer.lines.text.count("tl.load") == 1
    assert printer.lines.text.count(" * t") == 1


def test_a_value_varies_along_what_it_is_read_along() -> None:
    """A row's element is one column, so that it broadcasts; only its own bounds mask it."""
    x, y = Buffer((8,), "float32"), Buffer((16,), "float32")
    printer = _printer(x, y)
    bounds = {0: Value.along("i_in", 0), 1: Value.along("j_in", 1)}
    with printer.over(_TILE, {_I: index_of(_I), _J: index_of(_J)}, bounds):
        assert printer.expr(x.at((index_of(_I),))).dims == {0}
        assert printer.expr(y.at((index_of(_J),))).dims == {1}
    assert "tl.load(in0 + (i), i_in, other=0)" in printer.lines.text
    assert "tl.load(in1 + (j), j_in, other=0)" in printer.lines.text


def test_guards_mask_what_is_read_inside_them() -> None:
    """A place that does not depend on the condition is spread over it: a scalar's address takes no block of conditions."""
    x = Buffer((8,), "float32")
    printer = _printer(x)
    with printer.over(_TILE, {_I: index_of(_I), _J: index_of(_J)}, {}):
        condition = ops.index_in(index_of(_J), 0, 3)
        value = printer.expr(ops.guard(condition, x.at((as_index(5),)), ops.const(0.0, "float32")))
    assert value.dims == {1}
    assert "tl.load(in0 + (5 + tl.zeros([1, COLUMNS], tl.int32)), t" in printer.lines.text


def test_a_scope_forgets_what_was_printed_in_it() -> None:
    """Under other variables the same expression is another value."""
    x = Buffer((8,), "float32")
    printer = _printer(x)
    e = x.at((index_of(_I),))
    with printer.over(_TILE, {_I: index_of(_I)}, {}):
        first = printer.expr(e)
    with printer.over(_TILE, {_I: as_index(3)}, {}):
        second = printer.expr(e)
    assert first != second
    assert "tl.load(in0 + (3))" in printer.lines.text


def test_large_tensors_have_wide_addresses() -> None:
    """From 2^31 elements on."""
    assert _printer(Buffer((1 << 31,), "float32")).is_wide
    assert not _printer(Buffer(((1 << 31) - 1,), "float32")).is_wide


def test_stores_narrow() -> None:
    """To the dtype of the memory."""
    out = Buffer((8,), "bfloat16")
    printer = Printer(Lines(), [], [Argument(out, contiguous(out.shape))], {})
    printer.variable(_I, Value.along("i", 0))
    with printer.over(Tile(("ROWS",)), {_I: index_of(_I)}, {0: Value.along("i_in", 0)}):
        printer.store(Store(out, (index_of(_I),), ops.const(1.5, "float32")))
    assert printer.lines.text.endswith("tl.store(out0 + (i), t1.to(tl.bfloat16), i_in)")


def test_literals() -> None:
    assert [literal(v, "float32") for v in (1.5, float("inf"), float("-inf"), float("nan"))] == [
        "1.5",
        "float('inf')",
        "float('-inf')",
        "float('nan')",
    ]
    assert literal(True, "bool") == "True"
    assert literal(3, "int64") == "3"
