"""Tensors in blocks: what is computed of whole outputs, in float64 say, takes a few MiB however large they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

# 2 MiB in float64: what is computed of a few of them stays in the second-level cache.
BLOCK_ELEMENTS = 1 << 18


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same part of each of the tensors, all of one shape, part by part: views of `BLOCK_ELEMENTS` elements at most, and at least one."""
    first = tensors[0]
    if first.numel() <= BLOCK_ELEMENTS:
        if first.numel():
            yield tensors
        return
    # Along the dimension whose steps are the largest: a block is near together in memory.
    dimension = max((d for d in range(first.dim()) if first.shape[d] > 1), key=first.stride)
    size = max(1, first.shape[dimension] * BLOCK_ELEMENTS // first.numel())
    for parts in zip(*(torch.split(tensor, size, dimension) for tensor in tensors), strict=True):
        yield from blocks(*parts)


def mean_square(values: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> float:
    """The mean of the squares of what `values` makes of blocks of the tensors in float64 (complex128 of complex numbers); NaN of none."""
    total = sum((values(*map(widened, each)).abs().square().sum().item() for each in blocks(*tensors)), 0.0)
    count = tensors[0].numel()
    return total / count if count else float("nan")


def largest(values: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> float:
    """The largest magnitude of what `values` makes of blocks of the tensors, likewise; NaN where there is one, 0 of no elements."""
    # torch's maximum, unlike Python's, tells of any NaN.
    found = (values(*map(widened, each)).abs().max().cpu() for each in blocks(*tensors))
    return float(functools.reduce(torch.maximum, found, torch.zeros((), dtype=torch.float64, device="cpu")))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, or in complex128."""
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)
