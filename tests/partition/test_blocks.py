"""Tensors in blocks: every element once, whatever their layout; statistics as of whole tensors."""

from __future__ import annotations

import math

import pytest
import torch

from torch_hybrid_backend.partition.blocks import BLOCK_ELEMENTS, blocks, largest, mean_square


@pytest.mark.parametrize(
    "shape", [(), (0, 3), (5,), (3 * BLOCK_ELEMENTS + 1,), (7, 2 * BLOCK_ELEMENTS), (BLOCK_ELEMENTS, 2, 3)]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_every_element_is_in_one_block(shape: tuple[int, ...], reverse: bool) -> None:
    """No block is larger than it may be, and those of several tensors belong together, also where their strides differ."""
    size = math.prod(shape)
    first = torch.arange(size, dtype=torch.int32).reshape(shape)
    if reverse:
        first = first.permute(tuple(reversed(range(first.dim()))))
    second = first.contiguous() + 1
    seen = torch.zeros(size + 1, dtype=torch.bool)
    for a, b in blocks(first, second):
        assert 1 <= a.numel() <= BLOCK_ELEMENTS
        assert torch.equal(a + 1, b)
        seen[a.flatten().long()] = True
    assert int(seen.sum()) == size


def test_blocks_share_memory_with_their_tensors() -> None:
    """Blocks are views."""
    x = torch.zeros(4, BLOCK_ELEMENTS)
    for (block,) in blocks(x):
        block.add_(1)
    assert bool((x == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_statistics_are_those_of_whole_tensors(dtype: torch.dtype) -> None:
    """Computed in float64."""
    torch.manual_seed(0)
    a, b = ((torch.randn(3, BLOCK_ELEMENTS - 5, dtype=torch.complex64) * 20).to(dtype) for _ in range(2))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    off = (a.to(wide) - b.to(wide)).abs()
    assert mean_square(torch.sub, a, b) == pytest.approx(float(off.square().mean()))
    assert largest(torch.sub, a, b) == float(off.max())


def test_nan_is_told_wherever_it_is() -> None:
    """In the first block as in the last; of nothing there is no mean, and nothing is large."""
    for place in (0, -1):
        x = torch.zeros(3 * BLOCK_ELEMENTS)
        x[place] = math.nan
        assert math.isnan(largest(torch.neg, x))
        assert math.isnan(mean_square(torch.neg, x))
    assert largest(torch.neg, torch.empty(0)) == 0
    assert math.isnan(mean_square(torch.neg, torch.empty(0)))
