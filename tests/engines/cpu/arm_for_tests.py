"""Integers of 8 bits and options for tests of kernels for AArch64, which this machine runs by arithmetic in place of their instructions."""

from __future__ import annotations

import torch

OPTIONS = {"placement": "estimate", "prefer_kernels": True, "engines": "tvm", "strict": True}


def random_bytes(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random integers of 8 bits, half of them the least and the greatest."""
    low, high = (-128, 127) if dtype == torch.int8 else (0, 255)
    x = torch.randint(low, high + 1, size, dtype=dtype)
    x.view(-1)[::4], x.view(-1)[1::4] = low, high
    return x
