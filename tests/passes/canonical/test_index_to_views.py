"""Indexing by counting constants becomes views, with eager's values, strides and fresh memory."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.passes.canonical.dead_code import dead_code
from torch_hybrid_backend.passes.canonical.fold_constants import fold_constants
from torch_hybrid_backend.passes.canonical.index_to_views import index_to_views

aten = torch.ops.aten
PASSES = (fold_constants, index_to_views, dead_code)


def count(*shape: int, start: int = 0, step: int = 1) -> torch.Tensor:
    numbers = torch.Size(shape).numel()
    return torch.arange(start, start + numbers * step, step).view(shape) * 1


@pytest.mark.parametrize(
    ("function", "shape", "slices"),
    [
        (lambda x: x[count(1, 1, 1, 1), count(1, 1, 1, 7)], (1, 7), 0),  # a padding mask, batch 1
        (lambda x: x[count(3, 1, 1, 1), count(1, 1, 1, 7)], (3, 7), 0),
        (lambda x: x[:, count(5, start=1)], (3, 7, 2), 1),
        (lambda x: x[count(2, 1, start=1), count(1, 3, start=2, step=2)], (3, 7, 2), 2),
        (lambda x: x[:, count(1, start=6)], (3, 7, 2), 1),
        (lambda x: x[count(7).int()], (7,), 0),
    ],
)
def test_becomes_views(captured, function, shape, slices):
    """The gather is gone: whole dimensions need no slice, and what is not whole one each."""
    subject = captured(lambda x: function(x).sin(), torch.randn(shape))
    assert subject.apply(*PASSES, exact=True)
    operators = subject.operators()
    assert "index.Tensor" not in operators
    assert operators["slice.Tensor"] == slices


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x[torch.tensor([2, 0, 1])], (3, 7)),  # another order
        (lambda x: x[torch.tensor([0, 0, 0]), count(3)], (3, 7)),  # one number, repeated along an axis
        (lambda x: x[count(3), count(3)], (3, 7)),  # a diagonal
        (lambda x: x[count(1, 3), count(7, 1)], (3, 7)),  # a transposition
        (lambda x: x[count(3, 1), :, count(1, 2)], (3, 7, 2)),  # apart: the indexed dimensions come first
        (lambda x: x[count(2, start=-2)], (3, 7)),  # from the end
        (lambda x: x[count(3, 1)].flatten()[x.long().flatten()[:1] * 0], (3, 1)),  # by data
        (lambda x: x[torch.zeros(0, dtype=torch.int64)], (3, 7)),
    ],
)
def test_left_alone(captured, function, shape):
    """A gather that slices and a view cannot express stays."""
    subject = captured(lambda x: function(x).sin(), torch.randn(shape))
    subject.apply(*PASSES, exact=True)
    assert "index.Tensor" in subject.operators()


def test_output_is_fresh_memory(captured):
    """An output that is a copy stays one: it must not share the input's memory, nor have its strides."""
    subject = captured(lambda x: x[:, count(4, start=1)], torch.randn(3, 7))
    assert subject.apply(*PASSES, exact=True)
    (result,) = subject.run()
    assert result.is_contiguous()
    assert result.untyped_storage().data_ptr() != subject.inputs[0].untyped_storage().data_ptr()


def test_base_that_is_written_to(captured):
    """A graph that still writes to its tensors keeps its copies."""
    subject = captured(lambda x: x[count(3)].sin(), torch.randn(3))
    graph = subject.gm.graph
    (index,) = [n for n in graph.nodes if n.target is aten.index.Tensor]
    with graph.inserting_after(index):
        graph.call_function(aten.add_.Tensor, (index.args[0], 1)).meta["val"] = index.args[0].meta["val"]
    assert not index_to_views(subject.gm, subject.ctx)
