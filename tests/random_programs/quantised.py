"""PyTorch's operators on quantised tensors (`quantized_decomposed`) as programs call them, in float32 and for the run in float64.

The operators take and give float32. Programs quantise only what is exact (`scope`), by scales that are powers of two: so float64's run is the
same through float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed

_ops = torch.ops.quantized_decomposed


def _scales(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def quantize(x: torch.Tensor, *how: Any) -> torch.Tensor:
    """`how`: scale, zero point, least and largest integer, dtype."""
    return _ops.quantize_per_tensor.default(x, *how)


def dequantize(q: torch.Tensor, *how: Any) -> torch.Tensor:
    """`how` as above."""
    return _ops.dequantize_per_tensor.default(q, *how)


def quantize_channels(x: torch.Tensor, scales: list[float], zeros: list[int], *how: Any) -> torch.Tensor:
    """`how`: axis, least and largest integer, dtype. A scale and a zero point for each index along the axis."""
    return _ops.quantize_per_channel.default(x, _scales(scales), torch.tensor(zeros), *how)


def dequantize_channels(q: torch.Tensor, scales: list[float], zeros: list[int] | None, *how: Any) -> torch.Tensor:
    """`how` as above; no zero points are zeros."""
    return _ops.dequantize_per_channel.default(q, _scales(scales), None if zeros is None else torch.tensor(zeros), *how)


def quantize_rows(x: torch.Tensor, scales: list[float], zeros: list[int], *how: Any) -> torch.Tensor:
    """`x`: (rows, k). `how`: least and largest integer, dtype."""
    return _ops.quantize_per_token.default(x, _scales(scales)[:, None], torch.tensor(zeros)[:, None], *how)


def dequantize_rows(q: torch.Tensor, scales: list[float], zeros: list[int], *how: Any) -> torch.Tensor:
    """`how` as above."""
    return _ops.dequantize_per_token.default(
        q, _scales(scales)[:, None], torch.tensor(zeros)[:, None], *how, torch.float32
    )


def dequantize_groups(q: torch.Tensor, scales: list[list[float]], *how: Any) -> torch.Tensor:
    """`q`: (n, k), with a scale for each row and group of neighbours. `how`: least and largest integer, dtype, size of a group."""
    return _ops.dequantize_per_channel_group.default(
        q, torch.tensor(scales, dtype=torch.float32), None, *how, torch.float32
    )


FUNCTIONS: tuple[Callable[..., torch.Tensor], ...] = (
    quantize,
    dequantize,
    quantize_channels,
    dequantize_channels,
    quantize_rows,
    dequantize_rows,
    dequantize_groups,
)


def functions(wide: bool) -> dict[str, Callable[..., torch.Tensor]]:
    """The functions by name; `wide`: from float64 and to it."""

    def widened(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, *how: Any) -> torch.Tensor:
            result = function(x.float() if x.dtype is torch.float64 else x, *how)
            return result.double() if result.dtype is torch.float32 else result

        return run

    return {function.__name__: widened(function) if wide else function for function in FUNCTIONS}
