"""Indexing, joining and padding against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loops.check import EVERYTHING, check, sample
from loops.interpret import run_graph, trace
from torch_hybrid_backend.loops.lowering import supports

aten = torch.ops.aten


def integers(*shape: int, below: int, low: int = 0, seed: int = 0) -> torch.Tensor:
    return sample(*shape, dtype=torch.int64, low=low, high=below - 1, seed=seed)


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_gathers(dtype: torch.dtype) -> None:
    """embedding, index_select, gather and index read where they are told."""
    x = sample(5, 4, 3, dtype=dtype)
    check(aten.embedding.default, sample(7, 3, dtype=dtype), integers(2, 4, below=7))
    check(lambda a, i: aten.index_select.default(a, 1, i), x, integers(6, below=4))
    check(lambda a, i: aten.index_select.default(a, -1, i), x, torch.tensor(1))
    check(lambda a, i: aten.gather.default(a, 1, i), x, integers(2, 6, 3, below=4))
    check(lambda a, i: aten.index.Tensor(a, [i]), x, integers(2, 2, below=5, low=-5))


def test_index_of_other_widths() -> None:
    """int32 indices are taken as well."""
    check(aten.embedding.default, sample(7, 3), integers(2, 4, below=7).int())
    check(lambda a, i: aten.index_select.default(a, 0, i), sample(7, 3), integers(4, below=7).int())
    check(lambda a, i: aten.index.Tensor(a, [i]), sample(7, 3), integers(4, below=7).int())


def test_scalars() -> None:
    """Tensors without dimensions can be indexed, too."""
    check(lambda a, i: aten.gather.default(a, 0, i), torch.tensor(2.0), torch.tensor(0))
    check(lambda a, i: aten.gather.default(a, 0, i), torch.tensor([2.0, 3.0]), torch.tensor(1))
    check(lambda a, i: aten.index_select.default(a, 0, i), torch.tensor(2.0), torch.tensor([0]))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i, j: aten.index.Tensor(x, [i, j]),
        lambda x, i, j: aten.index.Tensor(x, [None, i, j]),
        lambda x, i, j: aten.index.Tensor(x, [i, None, j]),
        lambda x, i, j: aten.index.Tensor(x, [None, i, None, j]),
        lambda x, i, j: aten.index.Tensor(x, [None, None, i]) + j.sum(),
        lambda x, i, j: aten.index.Tensor(x, [i[0], None, j]),
        lambda x, i, j: aten._unsafe_index.Tensor(x, [None, i, j]),
    ],
)
def test_index_positions(fn: Callable[..., object]) -> None:
    """Broadcast index tensors replace neighbouring dimensions in place, separated ones at the front; negatives wrap."""
    check(fn, sample(4, 4, 4, 4), integers(2, 1, below=4, low=-4), integers(3, below=4, low=-4, seed=1))


def test_index_by_positions_of_a_range() -> None:
    """Indices that are ranges need no data: x[arange(n)] and the like."""
    check(lambda x: aten.index.Tensor(x, [aten.arange.start_step(1, 4, device=torch.device("cpu"))]), sample(5, 2))
    check(
        lambda x: aten.embedding.default(x, aten.arange.start_step(0, 3, device=torch.device("cpu")) + 2), sample(5, 2)
    )


def test_out_of_range_reads_stay_inside() -> None:
    """An index that eager raises on reads some element of the tensor, never memory outside of it."""
    x, wild = sample(5, 2), torch.tensor([-100, 3, 100])
    graph = trace(lambda a, i: aten.index.Tensor(a, [i]), [x, torch.tensor([0, 3, 4])])
    (result,) = run_graph(graph, [x, wild])
    assert torch.equal(result, x[torch.tensor([0, 3, 4])])


def test_masks_are_refused() -> None:
    """A mask's result has a shape that depends on data."""
    graph = torch.fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    node = graph.call_function(aten.index.Tensor, (x, [mask]))
    with torch._subclasses.FakeTensorMode():
        x.meta["val"], mask.meta["val"], node.meta["val"] = torch.empty(3), torch.empty(3).bool(), torch.empty(3)
    assert not supports(node)


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_joins(dtype: torch.dtype) -> None:
    """cat and stack along any dimension."""
    parts = [sample(2, n, 3, dtype=dtype, seed=n) for n in (1, 4, 2, 1, 3)]
    check(lambda *t: aten.cat.default(list(t), 1), *parts)
    check(lambda *t: aten.cat.default(list(t), -2), *parts[:2])
    check(lambda a: aten.cat.default([a, a]), parts[0])
    check(lambda *t: aten.stack.default(list(t), -1), parts[0], parts[3])
    check(lambda *t: aten.stack.default(list(t)), parts[0], parts[3], parts[0])


def test_join_promotes() -> None:
    """Joined tensors take the common dtype."""
    check(lambda a, b: aten.cat.default([a, b]), sample(3), sample(2, dtype=torch.int64))
    check(lambda a, b: aten.cat.default([a, b]), sample(3, dtype=torch.bfloat16), sample(2, dtype=torch.float64))


def test_slices_of_joins_fold() -> None:
    """A slice that lies in one part of a join reads that part, and nothing decides where it lies."""
    check(lambda a, b: aten.cat.default([a, b])[3:], sample(3), sample(4))
    check(lambda a, b: aten.cat.default([a, b])[1:5].flip(0), sample(3), sample(4))


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_constant_padding(dtype: torch.dtype) -> None:
    """Zeros or a value around; negative numbers crop; paddings of paddings."""
    x = sample(2, 3, 4, dtype=dtype)
    check(lambda a: aten.constant_pad_nd.default(a, [1, 2]), x)
    check(lambda a: aten.constant_pad_nd.default(a, [0, 1, 2, 0, 1, 1], 1), x)
    check(lambda a: aten.constant_pad_nd.default(a, [-1, 2, 1, -2]), x)
    check(lambda a: aten.constant_pad_nd.default(aten.constant_pad_nd.default(a, [1, 1], 1), [2, 0, 1, 1])[:, 1:], x)


@pytest.mark.parametrize("kind", ["reflection_pad", "replication_pad"])
def test_mirrored_padding(kind: str) -> None:
    """Edges are mirrored or repeated, in one to three dimensions."""
    for rank, pad in ((1, [2, 1]), (2, [2, 1, 0, 3]), (3, [1, 0, 2, 1, 1, 1])):
        target = getattr(aten, f"{kind}{rank}d").default
        check(_padded(target, pad), sample(2, *[4] * (rank + 1)))
        check(_padded(target, pad), sample(*[5] * (rank + 1), dtype=torch.bfloat16))


def _padded(target: Callable[..., object], pad: list[int]) -> Callable[[torch.Tensor], object]:
    return lambda x: target(x, pad)


def test_scatters_of_parts() -> None:
    """slice_scatter and select_scatter replace exactly the part."""
    x = sample(5, 7)
    check(lambda a, b: aten.slice_scatter.default(a, b, 0, 1, 4), x, sample(3, 7))
    check(lambda a, b: aten.slice_scatter.default(a, b, 1, 1, 7, 3), x, sample(5, 2))
    check(lambda a, b: aten.slice_scatter.default(a, b, -1, -3, 9223372036854775807), x, sample(5, 3))
    check(lambda a, b: aten.slice_scatter.default(a, b, 0), x, sample(5, 7, seed=9))
    check(lambda a, b: aten.select_scatter.default(a, b, 1, -2), x, sample(5))


@pytest.mark.parametrize("diagonal", [-2, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64], ids=str)
def test_triangles(diagonal: int, dtype: torch.dtype) -> None:
    """Triangles of the last two dimensions."""
    x = sample(2, 4, 5, dtype=dtype)
    check(lambda a: aten.triu.default(a, diagonal), x)
    check(lambda a: aten.tril.default(a, diagonal), x)
