"""The simplest choices of a backend."""

from __future__ import annotations

import torch

from tests.codegen.regions_for_tests import region_of
from torch_hybrid_backend.codegen.backend import row_major
from torch_hybrid_backend.engines.cpu.policy import POLICY
from torch_hybrid_backend.loops.fusion import fuse
from torch_hybrid_backend.loops.graph import lower_region
from torch_hybrid_backend.loops.layout import Strided, contiguous


def test_row_major() -> None:
    """Every buffer that is written lies row by row, but for those whose layout is given."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w, 1) @ w

    region = region_of(function, torch.randn(8, 8), torch.randn(8, 8))
    graph = lower_region(region, POLICY)
    (output,) = graph.outputs
    fixed = {**{buffer: contiguous(buffer.shape) for buffer in graph.inputs}, output: Strided((1, 8))}
    layouts = row_major(fuse(graph, POLICY), fixed)
    assert layouts[output] == Strided((1, 8))
    assert set(layouts) == {*graph.inputs, *(op.out for op in graph.ops)}
    assert all(layouts[op.out] == contiguous(op.out.shape) for op in graph.ops if op.out is not output)
