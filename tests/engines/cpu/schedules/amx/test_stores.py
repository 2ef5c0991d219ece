"""The stores behind products on tiles."""

from __future__ import annotations

import ctypes
import dataclasses

import torch

from tests.engines.cpu.amx_for_tests import emulated
from tests.engines.cpu.schedule_runner import row_major, run_kernel
from tests.engines.cpu.schedules.amx.products_for_tests import (
    TILES_HOST,
    kernel_of,
    operands_of,
)
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.operands.packing import pack_tiles
from torch_hybrid_backend.engines.cpu.schedules.matmul.amx import emit
from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
from torch_hybrid_backend.engines.cpu.weights import AmxTiles
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr
from torch_hybrid_backend.loops.kernels import Store

__all__ = ["emulated"]  # the fixture


def test_what_depends_on_the_column_is_computed_once_unless_behind_a_guard(emulated: ctypes.CDLL) -> None:
    """A bias and a scale are read for a panel of rows; what is read in some columns only is not read in the others, where nothing lies."""
    shape = (1, 40, 32, 70)
    a, b = operands_of(shape, "bfloat16")
    kernel = kernel_of(shape, "bfloat16")
    point, column = tuple(map(index_of, kernel.domain)), index_of(kernel.domain[2])
    bias, tail = Buffer((70,), "float32", "bias"), Buffer((6,), "float32", "tail")
    sums = kernel.accumulator.at(point)
    scaled = ops.mul(sums, ops.call("exp", bias.at((column,))))
    behind = ops.guard(ops.index_in(column, 64, 70), ops.add(scaled, tail.at((column - 64,))), scaled)
    (out,) = kernel.writes
    read_a, packed, _ = kernel.reads
    inputs = {
        read_a.buffer: a,
        packed.buffer: pack_tiles(b, FORMATS["bfloat16"]),
        bias: torch.randn(70),
        tail: torch.randn(6),
    }
    want = a.double() @ b.double() * inputs[bias].double().exp()

    def changed(value: Expr, *reads: Buffer) -> CpuMatMulKernel[AmxTiles]:
        arguments = (read_a, packed, *map(row_major, reads))
        return dataclasses.replace(kernel, reads=arguments, stores=(Store(out.buffer, point, value),))

    (got,) = run_kernel(changed(scaled, bias), emit, {k: v for k, v in inputs.items() if k is not tail}, TILES_HOST)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
    guarded = changed(behind, bias, tail)
    (got,) = run_kernel(guarded, emit, inputs, TILES_HOST)
    want[..., 64:] += inputs[tail].double()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
    assert "of_columns" in emit_kernel(changed(scaled, bias), "k", TILES_HOST).script()
    assert "of_columns" not in emit_kernel(guarded, "k", TILES_HOST).script()
