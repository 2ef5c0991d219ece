"""Scatters against eager: what meets, what threads share, dtypes, and the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW
from tests.partition.engines_for_tests import trace
from tests.services_for_tests import services
from torch_hybrid_backend.codegen.engine import KernelEngine, KernelRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.kernels import ScatterKernel
from torch_hybrid_backend.partition.regions import partition_graph

aten = torch.ops.aten
Function = Callable[..., torch.Tensor]


def _compiled(
    function: Function, *inputs: torch.Tensor, target: Target = HOST
) -> tuple[KernelRegion, list[torch.Tensor]]:
    """The function's one region, and what it takes of the inputs."""
    engine = KernelEngine(TvmBackend(target), Config(), services())
    graph = partition_graph(trace(function, *inputs), [engine], Config()).graph
    (segment,) = graph.segments
    (region,) = engine.compile([segment.region], Deadline(120.0))
    assert isinstance(region, KernelRegion), region
    return region, [inputs[graph.inputs.index(name)] for name in segment.inputs]


def _check(function: Function, *inputs: torch.Tensor, target: Target = HOST, tolerance: float = 1e-5) -> torch.Tensor:
    """The function's result by one region with a scatter, which is float64's of eager, and the same twice."""
    region, taken = _compiled(function, *inputs, target=target)
    assert any(isinstance(kernel, ScatterKernel) for kernel in region.kernels.kernels)
    (result,), (again,) = region(taken), region(taken)
    assert torch.equal(result.contiguous().view(torch.uint8), again.contiguous().view(torch.uint8))
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    torch.testing.assert_close(result.to(exact.dtype), exact, rtol=tolerance, atol=tolerance, equal_nan=True)
    return result


def _messages(x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Messages along edges, summed up in the nodes that they reach: x (N, F), edges (2, E), weight (E,)."""
    sent = x.index_select(0, edges[0]) * weight[:, None]
    return aten.scatter_add.default(x.new_zeros(x.shape), 0, edges[1][:, None].expand(sent.shape), sent)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "three cores"])
@pytest.mark.parametrize("features", [1, 5, 32, 96])
def test_messages(features: int, target: Target) -> None:
    """Threads share columns, or rows, or both; nodes that no edge reaches are 0, and the first and the last node are reached often."""
    nodes, edges = 53, torch.randint(0, 50, (2, 900))
    edges[1, :20], edges[1, 20:40] = 0, nodes - 1
    _check(_messages, torch.randn(nodes, features), edges, torch.randn(900), target=target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8])
def test_dtypes(dtype: torch.dtype) -> None:
    """Half types are held in float32, narrow integers in int32."""
    x, rows = (4 * torch.randn(40, 6)).to(dtype), (4 * torch.randn(300, 6)).to(dtype)
    index = torch.randint(0, 40, (300,))
    _check(lambda x, i, r: x.index_add(0, i, r), x, index, rows, tolerance=2e-2 if dtype.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_reductions(reduce: str, include_self: bool) -> None:
    """Sums, means and extremes, with NaN and infinities."""
    x, rows = torch.randn(40, 3, 4), torch.randn(300, 3, 4)
    rows[3], rows[5, 0], x[7], rows[6, 1] = torch.nan, torch.inf, torch.nan, -torch.inf
    index = torch.randint(0, 30, (300,))[:, None, None].expand(300, 3, 4)
    _check(lambda x, i, r: aten.scatter_reduce.two(x, 0, i, r, reduce, include_self=include_self), x, index, rows)


def test_places() -> None:
    """An index for each element, along the last or an inner dimension; positions in two dimensions; a flat tensor."""
    x, source = torch.randn(30, 20, 10), torch.randn(30, 50, 10)
    _check(lambda x, i, s: x.scatter_add(1, i, s), x, torch.randint(0, 20, source.shape), source)
    _check(lambda x, i, s: x.scatter_add(2, i, s), x, torch.randint(0, 10, (30, 20, 60)), torch.randn(30, 20, 60))
    # Fewer points than places along the other dimensions.
    _check(lambda x, i, s: x.scatter_add(1, i, s), x, torch.randint(0, 20, (7, 50, 3)), source)
    rows, columns = torch.randint(-30, 30, (900,)), torch.randint(0, 20, (900,))
    _check(lambda x, r, c, s: x.index_put([r, c], s, accumulate=True), x, rows, columns, torch.randn(900, 10))
    _check(lambda x, i, s: x.put(i, s, accumulate=True), x, torch.randint(0, 6000, (9000,)), torch.randn(9000))


def test_the_last_write_stays() -> None:
    """The last of several writes to one element stays, whatever the threads."""
    x, source = torch.zeros(9, 64), torch.randn(400, 64)
    index = torch.randint(0, 9, (400,))
    result = _check(lambda x, i, s: aten.index_put(x, [i], s), x, index, source, tolerance=float("inf"))
    last = {int(row): number for number, row in enumerate(index)}
    for row, number in last.items():
        assert torch.equal(result[row], source[number])


def test_all_meet() -> None:
    """All points meet at one element, in the order of the domain: a sum of small numbers beside a large one is rounded as in a loop."""
    ones = torch.ones(5000, 3)
    ones[0] = 2.0**24
    index = torch.zeros(5000, dtype=torch.int64)
    region, taken = _compiled(lambda i, s: s.new_zeros(2, 3).index_add(0, i, s), index, ones)
    assert region(taken)[0].tolist() == [[2.0**24] * 3, [0.0] * 3]
