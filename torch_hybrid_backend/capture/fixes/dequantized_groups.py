"""Sizes of values that are dequantized in groups: those of what they are made of, that are known only at run time too.

PyTorch has no metadata kernel for `dequantize_per_channel_group` (torch 2.13), so tracing runs its formula, which cuts rows into groups and
joins them again. A row of s elements is (n * s // (n * s // 8)) * (s // 8) elements long then, for groups of 8: as many, but nothing
knows. A product with a weight of 16 rows says that this is 16, and not that s is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torch_hybrid_backend.torch_private import DispatchKey
from torch_hybrid_backend.torch_private import quantized_decomposed as _decomposed  # defines the operators

_META = DispatchKey.Meta


@contextlib.contextmanager
def plain_sizes_of_groups() -> Iterator[None]:
    """Traces have the operator's sizes as those of its input meanwhile.

    Dynamo compiles under one lock; what others trace meanwhile gets the same sizes, in a shorter form.
    """
    operator = torch.ops.quantized_decomposed.dequantize_per_channel_group.default
    if _META in operator.py_kernels:  # another trace's, around this one
        yield
        return
    operator.py_kernels[_META] = _sizes
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.pop(_META)
        operator._dispatch_cache.clear()


def _sizes(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    group_size: int,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """The formula's result, contiguous, without its values; what the formula raises."""
    _decomposed.dequantize_per_channel_group(
        x, scales, zero_points, quant_min, quant_max, dtype, group_size, output_dtype
    )
    return torch.empty(x.shape, dtype=output_dtype, device=x.device)
