"""PyTorch's operators on quantized tensors (`quantized_decomposed`) as programs call them, in float32 and for the run in float64.

The operators take and give float32, so float64's run goes through it. What is exact (`scope`) stays so. Of other values that are quantized some
may lie so near a tie that either integer is right: where, runs tell in which all that is quantized is moved a little (`NUDGES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed

from torch_hybrid_backend.partition.accuracy import NUDGE

_ops = torch.ops.quantized_decomposed

# The accuracy gate's.
NUDGES = (NUDGE, -NUDGE)


def _scales(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def quantize(x: torch.Tensor, *how: Any) -> torch.Tensor:
    """Quantize. `how`: scale, zero point, least and largest integer, dtype."""
    return _ops.quantize_per_tensor.default(x, *how)


def dequantize(q: torch.Tensor, *how: Any) -> torch.Tensor:
    """Dequantize. `how` as above."""
    return _ops.dequantize_per_tensor.default(q, *how)


def quantize_channels(x: torch.Tensor, scales: list[float], zeros: list[int], *how: Any) -> torch.Tensor:
    """Quantize by channel. `how`: axis, least and largest integer, dtype. A scale and a zero point for each index along the axis."""
    return _ops.quantize_per_channel.default(x, _scales(scales), torch.tensor(zeros), *how)


def dequantize_channels(q: torch.Tensor, scales: list[float], zeros: list[int] | None, *how: Any) -> torch.Tensor:
    """Dequantize by channel. `how` as above; no zero points are zeros."""
    return _ops.dequantize_per_channel.default(q, _scales(scales), None if zeros is None else torch.tensor(zeros), *how)


def quantize_rows(x: torch.Tensor, scales: list[float], zeros: list[int], *how: Any) -> torch.Tensor:
    """`x`: (rows, k). `how`: least and largest integer, dtype."""
    return _ops.quantize_per_token.default(x, _scales(scales)[:, None], torch.tensor(zeros)[:, None], *how)


def dequantize_rows(q: torch.Tensor, scales: list[float], zeros: list[int], *how: Any) -> torch.Tensor:
    """Dequantize by row. `how` as above."""
    return _ops.dequantize_per_token.default(
        q, _scales(scales)[:, None], torch.tensor(zeros)[:, None], *how, torch.float32
    )


def quantize_groups(x: torch.Tensor, scales: list[list[float]], zeros: list[list[int]], *how: Any) -> torch.Tensor:
    """`x`: (n, k), with numbers for each row and group of neighbours. `how`: least and largest integer, dtype, size of a group."""
    return _ops.quantize_per_channel_group.default(x, _scales(scales), torch.tensor(zeros), *how)


def dequantize_groups(
    q: torch.Tensor, scales: list[list[float]], zeros: list[list[int]] | None, *how: Any
) -> torch.Tensor:
    """Dequantize by group. `how` as above; no zero points are zeros."""
    centre = None if zeros is None else torch.tensor(zeros)
    return _ops.dequantize_per_channel_group.default(q, _scales(scales), centre, *how, torch.float32)


# By scales found at run time. The scales are no values of programs: eager's dtypes of them are not what PyTorch tells (2.13).

_EPS = 1e-5


def _now(x: torch.Tensor, way: str, bounds: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale and a zero point for a tensor ("affine", "symmetric"), or for each of its rows ("rows", "affine rows").

    They have no gradient, as those of observers have none.
    """
    x = x.detach()
    if way == "affine":
        return _ops.choose_qparams.tensor(x, *bounds[:2], _EPS, bounds[2])
    if way == "symmetric":
        return _ops.choose_qparams_symmetric.tensor(x, *bounds[:2], _EPS, bounds[2])
    if way == "rows":
        return _ops.choose_qparams_per_token.default(x, bounds[2])
    return _ops.choose_qparams_per_token_asymmetric.default(x, bounds[2])


def quantize_now(x: torch.Tensor, way: str, *bounds: Any) -> torch.Tensor:
    """`bounds`: least and largest integer, dtype."""
    scale, zero = _now(x, way, bounds)
    if way in ("affine", "symmetric"):
        return _ops.quantize_per_tensor.tensor(x, scale, zero, *bounds)
    return _ops.quantize_per_token.default(x, scale, zero, *bounds)


def dequantize_now(q: torch.Tensor, x: torch.Tensor, way: str, *bounds: Any) -> torch.Tensor:
    """`q`: of `x`, as above."""
    scale, zero = _now(x, way, bounds)
    if way in ("affine", "symmetric"):
        return _ops.dequantize_per_tensor.tensor(q, scale, zero, *bounds)
    return _ops.dequantize_per_token.default(q, scale, zero, *bounds, torch.float32)


# As graphs of torchao write it out, in plain operators.


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """(..., 1): for each row along the last dimension, its largest magnitude over the largest integer."""
    return x.abs().amax(-1, keepdim=True).clamp(min=_EPS) / 127


def quantize_row_wise(x: torch.Tensor) -> torch.Tensor:
    """By the scales above, to int8."""
    return quantize_plainly(x, row_scales(x), 0, -127, 127, torch.int8)


def quantize_plainly(x: torch.Tensor, scale: Any, zero: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Divided by the scale, instead of multiplied by its reciprocal."""
    return torch.clamp(torch.round(x / scale) + zero, low, high).to(dtype)


FUNCTIONS: tuple[Callable[..., torch.Tensor], ...] = (
    quantize,
    dequantize,
    quantize_channels,
    dequantize_channels,
    quantize_rows,
    dequantize_rows,
    quantize_groups,
    dequantize_groups,
    quantize_now,
    dequantize_now,
    row_scales,
    quantize_row_wise,
    quantize_plainly,
)


def functions(wide: bool, nudge: float = 0.0) -> dict[str, Callable[..., torch.Tensor]]:
    """The functions by name; `wide`: from float64 and to it, with operands moved by `nudge` of their largest value."""

    def narrow(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
            return value
        return (value + nudge * value.abs().max() if nudge and value.numel() else value).float()

    def widened(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*given: Any) -> torch.Tensor:
            result = function(*map(narrow, given))
            return result.double() if result.dtype is torch.float32 else result

        return run

    return {function.__name__: widened(function) if wide else function for function in FUNCTIONS}
