"""A few elements of an input that a graph changes are written to it, and to nothing else; the input is not copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.capture.fixes.input_updates import write_in_place
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.graph.values import output_nodes

Function = Callable[..., torch.Tensor]


def _position(cache: torch.Tensor, other: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, at, new * 2)
    return cache.sum(1)


def _view(cache: torch.Tensor, other: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """A program that writes to a part of a larger value that is returned too, and positions count from the end."""
    both = torch.cat([new, new + 1], 2)
    cache[:, at - 3] = both[..., : new.shape[2]]
    return both * cache.mean()


def _given(cache: torch.Tensor, other: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """A program that writes an input as it is."""
    cache[:, at] = new
    return cache * 2


def _moved(cache: torch.Tensor, other: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Both are written to; the second reads what the first was, and where is changed after its use."""
    before = cache[:, 4:5] + 0
    cache[:, at] = new
    other[:, at] = before
    at.add_(1)
    return cache + other


def _swapped(cache: torch.Tensor, other: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """A program that writes a changed input, as it was."""
    before = new.clone()
    new[:, :, at[0] : at[0] + 1] = 5.0
    cache[:, at] = before
    return cache


@pytest.mark.parametrize(
    ("function", "strided"),
    [
        *((function, False) for function in (_position, _view, _given, _moved, _swapped)),
        (_position, True),
        (_view, True),
    ],
)
def test_updates_are_eagers(function: Function, strided: bool, tmp_path: Path) -> None:
    """Results, and all inputs after each call, are as eager's, in whatever way a cache lies in memory."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    config = Config(cache_dir=tmp_path, placement="estimate", strict=True)
    compiled = torch.compile(function, backend=partial(compile_graph, config=config), dynamic=False)

    def cache() -> torch.Tensor:
        return torch.randn(2, 8, 64).transpose(1, 2)[:, :, :6] if strided else torch.randn(2, 64, 6)

    ours = (cache(), cache(), torch.randn(2, 1, 6), torch.tensor([2]))
    theirs = tuple(value.clone() for value in ours)
    if strided:
        assert not ours[0].is_contiguous()
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(*ours), function(*theirs))
            for mine, wanted in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("positions", "is_small"), [(1, True), (32, False)])
def test_a_cache_is_not_copied(recorder, positions, is_small):
    """The graph gives what is written of a small part alone; a change of a large part is the whole as before."""
    compiled = recorder.compile(_position)
    inputs = (torch.randn(2, 64, 6), torch.randn(1), torch.randn(2, positions, 6), torch.arange(positions))
    with torch.no_grad():
        compiled(*inputs)
    sizes = {tuple(node.meta["val"].shape) for node in output_nodes(recorder.graphs[0].graph_module)}
    assert ((2, positions, 6) in sizes, (2, 64, 6) in sizes) == (is_small, not is_small)


def test_the_input_stands_for_its_new_value():
    """The input itself is copied onto the input by AOTAutograd's wrapper: PyTorch then copies nothing."""

    def function(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten.index_put(cache, [None, at], new * 2), new + 1

    cache, new, at = torch.zeros(2, 64, 6), torch.ones(2, 1, 6), torch.tensor([3])
    graph = make_fx(function, tracing_mode="fake")(cache, new, at)
    update = write_in_place(graph, [0])
    assert update is not None
    held = (cache, new, at)
    first, second = update.restorer()(graph(*held), [held[position] for position in update.inputs])
    assert first is cache
    assert cache.sum() == 24
    assert torch.equal(second, new + 1)


def test_a_missing_position_raises(tmp_path: Path) -> None:
    """A position beyond the cache is an error, as in eager, and not a write somewhere else."""
    torch._dynamo.reset()
    config = Config(cache_dir=tmp_path, placement="estimate", strict=True)
    compiled = torch.compile(_given, backend=partial(compile_graph, config=config), dynamic=False)
    cache, new = torch.zeros(2, 64, 6), torch.ones(2, 1, 6)
    with torch.no_grad():
        compiled(cache, cache.clone(), new, torch.tensor([3]))
        with pytest.raises(IndexError):
            compiled(cache, cache.clone(), new, torch.tensor([64]))
    assert cache.sum() == 12
