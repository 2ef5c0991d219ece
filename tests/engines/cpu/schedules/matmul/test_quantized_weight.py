"""Every element of a packed weight, read as schedules read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, run_kernel
from tests.engines.cpu.schedules.matmul.test_weight_only import kernel_of, packed_weight
from torch_hybrid_backend.engines.cpu.kernels import CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b
from torch_hybrid_backend.engines.cpu.schedules.matmul.quantized_weight import QuantizedWeight
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import Quantized
from torch_hybrid_backend.loops.index import Index


def _dequantized(kernel: CpuMatMulKernel[Quantized], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """In place of the kernel's product: out[0, k, n] = weight[k, n]. The kernel has as many rows as its weight, and whole panels."""
    b, width = builder, kernel.weight.width
    weight = QuantizedWeight(kernel, builder, printer, target.lanes)
    (written,) = kernel.writes
    out, columns = printer.arguments[written.buffer][0], int(kernel.domain[2].extent)

    def word(position: tuple[Index, ...]) -> Stmt:
        panel, number = position
        k = number * weight.per_word
        place = weight.words_before(panel, k)

        def put(j: int, vector: int) -> Stmt:
            def of(lane: Index) -> Stmt:
                column, group = lane + vector * target.lanes, k // weight.group
                value = weight.moved(weight.integer(place, j, column), panel, group, column)
                scale = weight.of_group(panel, group, column, zero=False)
                return b.store(out, (k + j) * columns + panel * width + column, value * scale)

            return printer.vector_loop(target.lanes, of)

        vectors = range(width // target.lanes)
        puts = [put(j, vector) for j in range(weight.per_word) for vector in vectors]
        return b.seq(weight.ahead(place, 1), weight.ahead(place, 1, weight.panel_words), *puts)

    return b.seq(*weight.table(), b.nest((columns // width, weight.depth // weight.per_word), word))


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    "how",
    [
        {"bits": 8, "group": 0},
        {"bits": 8, "group": 0, "dtype": "uint8", "zeros": True},
        {"bits": 8, "group": 32, "in_words": True, "zeros": True},
        {"bits": 4, "group": 32},
        {"bits": 4, "group": 32, "zeros": True},
        {"bits": 4, "group": 32, "scaled_by": "bfloat16"},
        {"bits": 8, "group": 32, "in_words": True, "scaled_by": "float16"},
        {"bits": 4, "group": 0, "looked_up": True},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_elements(how: dict[str, Any], target: Target) -> None:
    """(integer - zero point) * scale of its group in units of `unit`, or the table's value; exactly, for every packing."""
    k, panels = 64, 2
    kernel = kernel_of(k, k, panels * 2 * target.lanes, target, **how)
    weight = kernel.weight
    n, group = int(kernel.domain[2].extent), weight.group
    torch.manual_seed(0)
    low, high = (-8, 8) if weight.bits == 4 else (0, 256) if weight.buffer.dtype == "uint8" else (-128, 128)
    q = torch.randint(low, high, (1, k, n))
    scale, zero = torch.rand(1, k // group, n), torch.randint(low, high, (1, k // group, n)).float()
    scale = scale.to(getattr(torch, weight.scales.dtype))
    inputs = {argument.buffer: torch.zeros([int(size) for size in argument.buffer.shape]) for argument in kernel.reads}
    inputs |= {weight.buffer: packed_weight(q, weight), weight.scales: pack_b(scale, weight.width)}
    want = q.float()
    if weight.zeros is not None:
        inputs[weight.zeros] = pack_b(zero, weight.width)
        want = want - zero.repeat_interleave(group, 1)
    if weight.table is not None:
        inputs[weight.table] = torch.randn(16)
        want = inputs[weight.table][q % 16]
    unit = 2.0**28 if weight.bits == 4 and weight.table is None else 1.0
    (got,) = run_kernel(kernel, _dequantized, inputs, target)
    assert torch.equal(got / unit, want * scale.float().repeat_interleave(group, 1))
