"""Errors of values along a program's lines, and errors added on purpose: what an answer as careful as eager's may look like."""

from __future__ import annotations

import torch

MOVE = "move"  # takes some of the operands' values: exact where they are
ARITHMETIC = "arithmetic"  # exact where the operands are and the result is on the grid, else rounded
SUM = "sum"  # as arithmetic, over many elements in any order
SMOOTH = "smooth"  # a function whose last digits are everyone's own
REDUCTION = "reduction"  # as smooth, and errors scale with the largest element
STEP = "step"  # exact in, exact out: comparisons, rounding, positions, integers
QUANTISE = "quantize"  # inexact in, integers out: beside a tie either side is right, and everywhere else one integer

LARGEST_EXACT = 4096.0


def on_grid(wide: torch.Tensor) -> bool:
    """True if all elements are small multiples of 1/256: sums and products of a few such are exact in any order."""
    if not wide.numel():
        return True
    grid = wide * 256
    return float(wide.abs().max()) <= LARGEST_EXACT and bool(torch.equal(grid, grid.round()))


def add_noise(noisy: torch.Tensor, dtype: torch.dtype, kind: str, generator: torch.Generator) -> None:
    """Add to a float64 tensor, in place and unseen by autograd, an error of a few units in the last place of `dtype`."""
    if not noisy.numel() or any(step == 0 and size > 1 for step, size in zip(noisy.stride(), noisy.shape, strict=True)):
        return
    values = noisy.data
    share = 4 * torch.finfo(dtype).eps * (torch.rand(values.shape, generator=generator, dtype=torch.float64) * 2 - 1)
    values += share * (values.abs().max() if kind in (REDUCTION, SUM) else values)
