"""Graphs that can be run again unnoticed, by schemas and tags of operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives  # brings the collectives' operators
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.graph.values import is_repeatable

X = torch.ones(4, 4)


@torch.library.custom_op("hybrid_repeatable::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    """An operator of another library."""
    return x * 2


@plain.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _is_repeatable(function: Callable[..., object]) -> bool:
    return is_repeatable(make_fx(function, tracing_mode="fake")(X))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x @ x).relu() + 1,
        lambda x: torch.topk(torch.nn.functional.embedding_bag(x.long(), x), 2)[1],
        lambda x: x.t()[1:],
    ],
)
def test_graphs_that_compute(function: Callable[..., object]) -> None:
    """Products, look-ups, tuples and views do nothing besides."""
    assert _is_repeatable(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.rand_like(x) + x,
        lambda x: torch.nn.functional.dropout(x, 0.5, training=True),
        lambda x: x.add_(1),
        lambda x: torch.ops._c10d_functional.all_reduce(x + 1, "sum", "group"),
        lambda x: plain(x) + 1,
    ],
    ids=["random", "dropout", "in place", "collective", "another library"],
)
def test_graphs_that_do_more(function: Callable[..., object]) -> None:
    """Random numbers, writes, communication, and what is not known."""
    assert not _is_repeatable(function)
