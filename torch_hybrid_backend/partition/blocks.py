"""Tensors in blocks, so that float64 computations on whole outputs take a few MiB, however large the outputs are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

# 2 MiB in float64: values computed from a few blocks stay in the second-level cache.
BLOCK_ELEMENTS = 1 << 18


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same block of each of the tensors, block by block. Blocks are views of 1 to `BLOCK_ELEMENTS` elements.

    All tensors have one shape.
    """
    first = tensors[0]
    if first.numel() <= BLOCK_ELEMENTS:
        if first.numel():
            yield tensors
        return
    # Split along the dimension with the largest stride, so that a block is contiguous in memory or nearly so.
    dimension = max((d for d in range(first.dim()) if first.shape[d] > 1), key=first.stride)
    size = max(1, first.shape[dimension] * BLOCK_ELEMENTS // first.numel())
    for parts in zip(*(torch.split(tensor, size, dimension) for tensor in tensors), strict=True):
        yield from blocks(*parts)


def mean_square(values: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> float:
    """The mean square of `values(*blocks)` over all blocks, in float64 (complex128 for complex tensors); NaN for no elements."""
    total = sum((values(*map(widened, each)).abs().square().sum().item() for each in blocks(*tensors)), 0.0)
    count = tensors[0].numel()
    return total / count if count else float("nan")


def largest(values: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> float:
    """The largest magnitude of `values(*blocks)` over all blocks; NaN if any value is NaN, 0 for no elements."""
    # torch.maximum, unlike Python's max, returns NaN if any value is NaN.
    maxima = (values(*map(widened, each)).abs().max().cpu() for each in blocks(*tensors))
    return float(functools.reduce(torch.maximum, maxima, torch.zeros((), dtype=torch.float64, device="cpu")))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, or in complex128."""
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)
