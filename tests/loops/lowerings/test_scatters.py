"""Scatters of few slices against eager."""

from __future__ import annotations

import pytest
import torch

from loops.check import EVERYTHING, FLOATS, check, sample
from torch_hybrid_backend.loops.lowering import supports
from torch_hybrid_backend.loops.lowerings.scatters import MAX_SLICES

aten = torch.ops.aten


def _positions(*shape: int, below: int) -> torch.Tensor:
    return sample(*shape, dtype=torch.int64, low=0, high=below - 1, seed=3)


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter(dtype: torch.dtype, dim: int) -> None:
    """Numbers and slices are put at data-dependent positions of any dimension."""
    x = sample(4, 5, 6, dtype=dtype)
    shape = list(x.shape)
    shape[dim] = 1
    index = _positions(*shape, below=x.shape[dim])
    check(lambda a, i: aten.scatter.value(a, dim, i, 1), x, index)
    check(lambda a, i, s: aten.scatter.src(a, dim, i, s), x, index, sample(4, 5, 6, dtype=dtype, seed=4))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_scatter_add(dtype: torch.dtype) -> None:
    """Values that meet at one position add up."""
    x, source = sample(4, 6, dtype=dtype), sample(4, 3, dtype=dtype, seed=5)
    check(lambda a, i, s: aten.scatter_add.default(a, 1, i, s), x, _positions(4, 3, below=2), source)


def test_the_last_of_several_writes_counts() -> None:
    """Slices written to one position: the last one stays."""
    index = torch.tensor([[1, 1, 0], [2, 2, 2]])
    check(lambda a, i, s: aten.scatter.src(a, 1, i, s), sample(2, 4), index, sample(2, 3, seed=6))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_index_put(dtype: torch.dtype, accumulate: bool) -> None:
    """Slices of one dimension, as a KV cache takes them; negative positions count from the end."""
    cache, new = sample(2, 3, 8, 4, dtype=dtype), sample(2, 3, 2, 4, dtype=dtype, seed=7)
    for position in (torch.tensor([5, 2]), torch.tensor([-1, -8])):
        check(lambda c, p, n: aten.index_put.default(c, [None, None, p], n, accumulate), cache, position, new)
    check(lambda c, p: aten.index_put.default(c, [p], c.new_full((), 7), accumulate), cache, torch.tensor([1]))


@pytest.mark.parametrize("offset", [0, 2, -1])
@pytest.mark.parametrize("dims", [(0, 1), (-1, 0), (1, 2)])
def test_diagonal_scatter(offset: int, dims: tuple[int, int]) -> None:
    """A diagonal of any two dimensions, above, on or below the main one."""
    x = sample(4, 5, 3)
    diagonal = torch.diagonal(x, offset, *dims)
    check(lambda a, s: aten.diagonal_scatter.default(a, s, offset, *dims), x, sample(*diagonal.shape, seed=8))


def test_loss_of_class_numbers() -> None:
    """The gradient of cross entropy is one expression."""

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ones = aten.scatter.value(torch.zeros_like(logits), 1, target.unsqueeze(1), -1.0)
        return logits.softmax(1) + ones

    check(loss, sample(5, 7), _positions(5, below=7))


def _refused(call: torch.fx.GraphModule, *values: torch.Tensor) -> bool:
    *sources, scatter, _output = call.graph.nodes
    for node, value in zip(sources, values, strict=True):
        node.meta["val"] = value
    scatter.meta["val"] = values[0]
    return not supports(scatter)


def test_many_slices_are_refused() -> None:
    """Each slice is asked for every element: many are left to eager. So are masks and several indices."""
    many = torch.zeros(MAX_SLICES + 1, dtype=torch.int64)
    x, new = torch.zeros(9, 3), torch.zeros(MAX_SLICES + 1, 3)
    put = torch.fx.symbolic_trace(lambda a, i, v: aten.index_put.default(a, [i], v))
    assert _refused(put, x, many, new)
    assert not _refused(put, x, many[:MAX_SLICES], new[:MAX_SLICES])
    mask = torch.fx.symbolic_trace(lambda a, m, v: aten.index_put.default(a, [m], v))
    assert _refused(mask, x, torch.ones(9, 3, dtype=torch.bool), torch.zeros(()))
    some = torch.fx.symbolic_trace(lambda a, i, v: aten.scatter.src(a, 0, i, v))
    assert _refused(some, x, torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3))
