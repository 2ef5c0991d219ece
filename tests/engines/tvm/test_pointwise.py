"""1x1 convolutions that compute their input: results against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engines.tvm.schedule_runner import HOST, NARROW, index_of, row_major, run_kernel
from tests.engines.tvm.test_convolution import Case, layout_of, make
from torch_hybrid_backend.engines.tvm import tiles
from torch_hybrid_backend.engines.tvm.schedules import convolution
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (Case((1, 64, 7, 9), 48, (1, 1)), (32, 32)),
        (Case((2, 37, 5, 11), 29, (1, 1), long_epilogue=True), (16, 20, 1)),
        (Case((3, 16, 1, 1), 1, (1, 1)), (16,)),
        (Case((1, 1, 13, 3), 7, (1, 1), blocked_out=False), (1,)),
        (Case((1, 40, 31), 130, (1,)), (5, 3, 32)),
        (Case((1, 96, 4, 4), 33, (1, 1), blocked_x=False), (48, 48)),
    ],
)
def test_relu_of_a_scaled_concatenation(case: Case, parts: tuple[int, ...], target: Target) -> None:
    """Parts that begin at a block of channels or within one, several images, rows of one image and of several."""
    kernel, inputs, _ = make(case, target)
    source, x_vars = kernel.reads[0].buffer, kernel.x_vars
    index = tuple(map(index_of, x_vars))
    torch.manual_seed(1)
    x, scale = inputs.pop(source), Buffer((case.x[1],), "float32", "scale")
    inputs[scale] = torch.randn(case.x[1])
    starts = [sum(parts[:n]) for n in range(len(parts))]
    buffers = [Buffer((case.x[0], n, *case.x[2:]), "float32", f"part{n}") for n in parts]
    value = buffers[-1].at((index[0], index[1] - starts[-1], *index[2:]))
    for part, start, n in reversed(list(zip(buffers[:-1], starts, parts, strict=False))):
        inside = ops.index_in(index[1], 0, start + n)
        value = ops.guard(inside, part.at((index[0], index[1] - start, *index[2:])), value)
    value = ops.call("max", ops.mul(value, scale.at(index[1:2])), ops.const(0, "float32"))
    reads = [Argument(b, layout_of(b, tiles.output_block(b.shape[1], 1, target), case.blocked_x)) for b in buffers]  # type: ignore[arg-type]
    kernel = dataclasses.replace(kernel, reads=(*reads, row_major(scale), *kernel.reads[1:]), x=value)
    inputs.update(zip(buffers, x.split(parts, 1), strict=True))
    (got,) = run_kernel(kernel, convolution.emit, inputs, target)

    weight, bias, residual = (t for b, t in inputs.items() if b.name in ("packed", "bias", "residual"))
    read = torch.relu(x.double() * inputs[scale].double().view(-1, *[1] * (x.dim() - 2)))
    # Packed: (1, blocks, 1, inputs, 1, lanes).
    plain = weight.double().permute(0, 1, 5, 2, 3, 4).reshape(-1, case.x[1])[: case.o]
    want = torch.einsum("nc...,oc->no...", read, plain) + bias.double().view(-1, *[1] * (x.dim() - 2))
    want = torch.relu(want + residual.double())
    for _ in range(4 * case.long_epilogue):
        want = want * 0.5 + residual.double()
    bound = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * bound)
