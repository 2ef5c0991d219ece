"""Size arithmetic of a lowered graph, in operators that have converters."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.engines.tensorrt.size_arithmetic import lower_sizes
from torch_hybrid_backend.sizes.size import symbol

aten = torch.ops.aten
S, T = symbol("s", 5), symbol("t", 7)
KNOWN = {aten.sym_size.int, operator.add, operator.mul}


def spelled(function: Callable[..., Any], *specs: TensorSpec) -> tuple[torch.fx.GraphModule, set[object]]:
    """The graph of a function, and the operators that compute its sizes."""
    fakes = Fakes()
    graph = fakes.traced(function, [fakes.tensor(spec) for spec in specs])
    lower_sizes(graph)
    graph.graph.lint()
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    return graph, {node.target for node in calls if isinstance(node.meta["val"], torch.SymInt)}


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_strides_are_products_of_sizes(rows: int) -> None:
    """Tracing takes 4 times the rows from the stride of an input."""
    by_columns = TensorSpec((2, S, 4), "float32", (4 * S, 1, S), CPU)
    graph, sizes = spelled(lambda x: x.new_ones(4 * x.shape[1]), by_columns)
    assert sizes <= KNOWN
    assert torch.equal(graph(torch.empty(2, rows, 4)), torch.ones(4 * rows))


def test_sums_of_several_sizes_are_added_one_by_one() -> None:
    """PyTorch sums any number of sizes; converters sum two."""
    plain = TensorSpec((S, T), "float32", (T, 1), CPU)
    graph, sizes = spelled(lambda x: x.new_ones(x.shape[0] + x.shape[1] + 1), plain)
    assert sizes <= KNOWN
    assert len(graph(torch.empty(3, 4))) == 8
    assert torch.sym_sum not in sizes


def test_a_stride_that_no_size_tells_stays() -> None:
    """A stride stays if memory has gaps whose size is no dimension of an input."""
    gaps = TensorSpec((2, S), "float32", (T, 1), CPU)
    graph, sizes = spelled(lambda x: x.new_ones(x.stride(0)), gaps)
    assert aten.sym_stride.int in sizes
    assert len(graph(torch.empty(2, 9)[:, :5])) == 9
