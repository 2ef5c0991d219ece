"""Prefetches of what the stores of a product read: which operands, and every line of a tile."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tvm import tirx

from tests.engines.cpu.schedule_runner import HOST, printer_of
from tests.engines.cpu.schedules.matmul.unpacked_for_tests import kernel_of
from torch_hybrid_backend.engines.cpu.schedules.matmul.operand_prefetch import Operands
from torch_hybrid_backend.engines.cpu.target import tvm_target
from torch_hybrid_backend.engines.cpu.tir.builder import argument, prim_func
from torch_hybrid_backend.engines.cpu.tir.pipeline import build
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, scalar_index
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import contiguous


@pytest.mark.parametrize(("rows", "lines", "turns"), [(1, 1, 1), (5, 2, 3), (4, 2, 8), (3, 1, 50)])
def test_every_line_of_a_tile(rows: int, lines: int, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All turns together ask for the first element of each line of the residual's tile, and for nothing else."""
    m, n, width = 20, 64, 16
    kernel = kernel_of(m, 8, n)
    printer = printer_of(kernel)
    b, touched = printer.builder, argument(m * n, "int32", "touched")

    def touch(array: object, offset: object) -> object:
        assert str(array).startswith("arg3")  # the residual
        return tirx.BufferStore(touched, tirx.const(1, "int32"), [offset])

    monkeypatch.setattr(b, "prefetch", touch)
    operands = Operands(printer, kernel.stores, kernel.domain)
    start = (as_index(0), as_index(7), as_index(32))
    body = b.loop(turns, lambda turn: operands.ahead(start, rows, lines, width, turn, turns))
    arrays = [array for array, _ in printer.arguments.values()]
    run = build("asked", prim_func("asked", [*arrays, touched], body), tvm_target(HOST))["asked"]
    found = torch.zeros(m * n, dtype=torch.int32)
    run(*(torch.zeros(argument.span) for argument in (*kernel.reads, *kernel.writes)), found)
    want = torch.zeros(m, n, dtype=torch.int32)
    want[7 : 7 + rows, 32 : 32 + lines * width : width] = 1
    assert torch.equal(found.view(m, n), want)


def test_what_lies_otherwise_is_left_out() -> None:
    """A bias is the same for all rows, a transposed residual has no line of a row, and a gathered row's number is not read twice."""
    kernel = kernel_of(8, 8, 8)
    _, row, column = domain = kernel.domain
    turned = Buffer((8, 8), "float32", "turned")
    table, numbers = Buffer((9, 8), "float32", "table"), Buffer((8,), "int64", "numbers")
    gathered = scalar_index(numbers.at((index_of(row),)), 0, 8)
    others = [
        kernel.reads[2].buffer.at((index_of(column),)),
        turned.at((index_of(column), index_of(row))),
        table.at((gathered, index_of(column))),
    ]
    value, (own,) = kernel.accumulator.at(tuple(map(index_of, domain))), kernel.stores
    stores = [Store(own.buffer, own.index, ops.add(value, other)) for other in others]
    more = tuple(Argument(buffer, contiguous(buffer.shape)) for buffer in (turned, table, numbers))
    printer = printer_of(dataclasses.replace(kernel, reads=(*kernel.reads, *more)))
    assert Operands(printer, stores, domain).loads == []
    assert [load.buffer.name for load in Operands(printer, kernel.stores, domain).loads] == ["residual"]
