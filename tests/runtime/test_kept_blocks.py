"""Memory of large results that callers dropped serves the next call; memory that anyone still sees does not."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator

import pytest
import torch

LARGE = (33 << 20) // 4 + 3  # float32 elements; from 32 MiB on memory is kept
Function = Callable[[torch.Tensor], torch.Tensor]


def double_plus_one(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@pytest.fixture
def compiled() -> Iterator[Function]:
    """Called often enough that the plan of the whole graph has taken over."""
    torch._dynamo.reset()
    call = torch.compile(double_plus_one, backend="hybrid", options={"placement": "estimate"})
    for _ in range(3):
        call(torch.ones(LARGE))
    yield call
    torch._dynamo.reset()


def test_memory_of_dropped_results_is_used_again(compiled: Function) -> None:
    """The pages of a result of 33 MiB are those of the one before, and hold the new values."""
    addresses = set()
    for value in range(4):
        result = compiled(torch.full((LARGE,), float(value)))
        assert bool((result == 2 * value + 1).all())
        addresses.add(result.data_ptr())
        del result
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "keep",
    [
        lambda result: result,
        lambda result: result[5:7],
        lambda result: result.numpy(),
        lambda result: result.untyped_storage(),
        torch.utils.dlpack.to_dlpack,
    ],
    ids=["tensor", "view", "numpy", "storage", "dlpack"],
)
def test_memory_in_use_is_not_used_again(compiled: Function, keep: Callable[[torch.Tensor], object]) -> None:
    """Whoever shares a result's memory keeps it from the next call."""
    first = compiled(torch.ones(LARGE))
    address = first.data_ptr()
    kept = keep(first)
    del first
    second = compiled(torch.zeros(LARGE))
    assert second.data_ptr() != address
    del kept
    gc.collect()
    assert compiled(torch.ones(LARGE)).data_ptr() == address


def test_results_are_ordinary_tensors(compiled: Function) -> None:
    """Results can be changed, saved, shared between processes, and made smaller; growing them beyond their memory is refused by torch."""
    result = compiled(torch.ones(LARGE))
    result.add_(1)
    buffer = io.BytesIO()
    torch.save(result, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), torch.full((LARGE,), 4.0))
    assert torch.equal(compiled(torch.ones(LARGE)).share_memory_(), torch.full((LARGE,), 3.0))
    assert result.resize_(5).tolist() == [4.0] * 5
    with pytest.raises(RuntimeError, match="not resizable"):
        result.resize_(2 * LARGE)


def test_memory_outlives_the_graph(compiled: Function) -> None:
    """A result stays valid when the plan that made it is gone."""
    result = compiled(torch.ones(LARGE))
    torch._dynamo.reset()
    gc.collect()
    assert bool((result == 3).all())
