"""Operands that are packed: which views can be, what the tensors are, and what is packed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torch_hybrid_backend.codegen.operands import OperandPacker, StridedView, strided_view
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Buffer, Expr, Map, MapOp, Value
from torch_hybrid_backend.loops.layout import Strided
from torch_hybrid_backend.sizes.size import symbol

_SOURCE = Buffer((4, 6), "float32", "source", constant=True)


def mapped(shape: tuple[int, ...], at: Callable[[tuple[Index, ...]], Expr]) -> Map:
    return Map(shape, "float32", at)


VIEWS: dict[str, tuple[Value, Callable[[torch.Tensor], torch.Tensor]]] = {
    "whole": (_SOURCE, lambda t: t),
    "transposed": (mapped((6, 4), lambda i: _SOURCE.at((i[1], i[0]))), lambda t: t.t()),
    "rows": (mapped((2, 6), lambda i: _SOURCE.at((i[0] + 1, i[1]))), lambda t: t[1:3]),
    "every second": (mapped((4, 3), lambda i: _SOURCE.at((i[0], i[1] * 2))), lambda t: t[:, ::2]),
    "repeated": (mapped((5, 6), lambda i: _SOURCE.at((i[0] * 0 + 2, i[1]))), lambda t: t[2].expand(5, 6)),
    "one column": (mapped((4, 1), lambda i: _SOURCE.at((i[0], i[1] + 3))), lambda t: t[:, 3:4]),
}


@pytest.mark.parametrize("case", VIEWS)
def test_views_of_a_tensor(case: str) -> None:
    """Views are taken of any tensor with the buffer's shape: one that lies otherwise, or begins in the middle of another's memory."""
    value, reference = VIEWS[case]
    view = strided_view(value)
    assert view is not None
    assert view.is_static
    for tensor in (torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(9, 6)[3:7]):
        assert torch.equal(view.of(tensor), reference(tensor))


def test_views_of_memory() -> None:
    """Given how the buffer lies, strides and offset are those of its memory."""
    view = strided_view(VIEWS["rows"][0], Strided((1, 4)))
    assert view == StridedView(_SOURCE, (2, 6), (1, 4), 1)
    assert strided_view(_SOURCE, Strided((1, 4))) == StridedView(_SOURCE, (4, 6), (1, 4), 0)


def test_clamped_views_of_bytes() -> None:
    """A constant's clamp is done where it is packed; one that changes, and floats, are computed. Other bounds are another operand."""

    def clamped(source: Buffer, low: int, high: int) -> Map:
        def at(i: tuple[Index, ...]) -> Expr:
            inner = ops.call("max", source.at((i[1], i[0])), ops.const(low, source.dtype))
            return ops.call("min", inner, ops.const(high, source.dtype))

        return Map((6, 4), source.dtype, at)

    source = Buffer((4, 6), "int8", constant=True)
    view = strided_view(clamped(source, -64, 64))
    assert view is not None
    assert view.bounds == (-64, 64)
    tensor = torch.randint(-128, 128, (4, 6), dtype=torch.int8)
    assert torch.equal(view.of(tensor), tensor.t().clamp(-64, 64))
    assert strided_view(clamped(Buffer((4, 6), "int8"), -64, 64)) is None
    assert strided_view(clamped(_SOURCE, -64, 64)) is None
    packer = OperandPacker()

    def packed(low: int) -> Buffer:
        return packer.pack(clamped(source, low, 64), torch.clone, lambda v: Map(v.shape, v.dtype, v.at), ())

    assert packed(-64) is packed(-64)
    assert packed(-64) is not packed(-63)


def test_what_is_no_view() -> None:
    """Something computed, something flipped, rows that are cut anew."""
    assert strided_view(mapped((4, 6), lambda i: ops.call("exp", _SOURCE.at(i)))) is None
    assert strided_view(mapped((4, 6), lambda i: _SOURCE.at((i[0], 5 - i[1])))) is None
    assert strided_view(mapped((24,), lambda i: _SOURCE.at((i[0] // 5, i[0] % 5)))) is None


def test_sizes_known_at_run_time_are_not_static() -> None:
    """A view with sizes known at run time is packed in every call."""
    n = symbol("n")
    view = strided_view(Buffer((n, 6), "float32"))
    assert view is not None
    assert not view.is_static


def packed_by(packer: OperandPacker, value: Value, how: int = 1) -> Buffer:
    """Packing: each element times `how`."""

    def each_call(operand: Value) -> Map:
        return Map(operand.shape, "float32", lambda i: ops.mul(operand.at(i), ops.const(how, "float32")))

    return packer.pack(value, lambda tensor: tensor * how, each_call, ("times", how))


def test_equal_operands_are_packed_once() -> None:
    """Equal are two of the same view, packed alike, though they are two objects."""
    packer = OperandPacker()
    first = packed_by(packer, VIEWS["transposed"][0])
    same = packed_by(packer, mapped((6, 4), lambda i: _SOURCE.at((i[1], i[0]))))
    others = [packed_by(packer, VIEWS["transposed"][0], 2), packed_by(packer, VIEWS["whole"][0])]
    assert first is same
    assert len({first, *others}) == 3
    prepared = packer.prepared(LoopGraph((_SOURCE,), (), (), ()))
    assert prepared.row_major == (first, *others)
    source = torch.randn(4, 6)
    assert [p.buffer for p in prepared.packed] == [first, *others]
    for packed, want in zip(prepared.packed, (source.t(), source.t() * 2, source), strict=True):
        assert packed.source is _SOURCE
        assert torch.equal(packed.pack(source), want)
    again = prepared.packed[0].repacked(others[0], lambda tensor: tensor + 1)
    assert torch.equal(again.pack(source), source.t() + 1)
    assert again.buffer is others[0]


def test_what_changes_is_packed_in_every_call() -> None:
    """By an operation that stands where it was asked for, before what reads it."""
    changing, out = Buffer((4, 6), "float32", "x"), Buffer((4, 6), "float32", "out")
    packer = OperandPacker()
    buffer = packed_by(packer, changing)
    reader = MapOp(out, buffer)
    packer.add(reader)
    assert packed_by(packer, changing) is buffer
    prepared = packer.prepared(LoopGraph((changing,), (out,), (), (MapOp(out, changing),)))
    assert not prepared.packed
    assert [op.out for op in prepared.graph.ops] == [buffer, out]
    assert prepared.graph.ops[1] is reader
    assert (prepared.graph.inputs, prepared.graph.outputs, prepared.row_major) == ((changing,), (out,), (buffer,))
    assert not buffer.constant
