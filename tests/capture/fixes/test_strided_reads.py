"""`as_strided` is given the tensor that owns the memory it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from torch_hybrid_backend.graph.values import storage_root

aten = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6)


def _reads(recorder, function: Callable[..., torch.Tensor], x: torch.Tensor = X, **options: object) -> list[Node]:
    """The graph's `as_strided` nodes; the results are eager's."""
    with torch.no_grad():
        torch.testing.assert_close(recorder.compile(function, **options)(x), function(x), check_stride=True)
    return recorder.graphs[-1].graph_module.graph.find_nodes(op="call_function", target=aten.as_strided.default)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_reads_the_value_that_a_view_is_of(recorder, dynamic: bool) -> None:
    """A view of an intermediate value is left out, with the place where it begins."""
    (node,) = _reads(recorder, lambda x: torch.as_strided((x + 1)[:, 1::2], (3, 2), (2, 1)), dynamic=dynamic)
    assert node.args[0].target is aten.add.Tensor
    assert node.args[3] == 1


def test_places_of_ones_own_are_kept(recorder) -> None:
    """The place that the caller says counts from the beginning of the memory, whatever the view."""
    (node,) = _reads(recorder, lambda x: torch.as_strided((x + 1)[:, 1::2], (3, 2), (2, 1), 4))
    assert (node.args[0].target, node.args[3]) == (aten.add.Tensor, 4)


def test_views_that_begin_where_an_input_does(recorder) -> None:
    """The place of a view of an input stays open: the input may begin anywhere in its memory."""
    memory = torch.arange(40.0)
    (node,) = _reads(recorder, lambda x: torch.as_strided(x[:, ::2], (3, 2), (2, 1)) + 1, memory[3:27].view(4, 6))
    assert node.args[0].op == "placeholder"
    assert len(node.args) == 3


def test_views_that_begin_behind_an_input(recorder) -> None:
    """The memory that is read is taken from where the input begins, without gaps."""
    first, last = _reads(recorder, lambda x: torch.as_strided(x[:, 1::2], (3, 2), (2, 1)) + 1)
    assert first.args[0].op == "placeholder"
    assert first.args[1:] == ([7], [1])
    assert last.args[0].args == (first, 0, 1, 7)
    assert storage_root(last) is first.args[0]


def test_other_dtypes_are_left_alone(recorder) -> None:
    """A view of other bits has other places."""
    (node,) = _reads(recorder, lambda x: torch.as_strided((x + 1).view(torch.int32)[:, ::2], (3, 2), (2, 1)))
    assert node.args[0].target is aten.slice.Tensor
