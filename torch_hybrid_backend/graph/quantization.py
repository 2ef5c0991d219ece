"""Quantization of layers: the operators, written once for graphs and for tensors.

`apply(operator, *arguments)` is what a step does: calls the operator, or inserts a node for it. Weights are of int8, symmetric, with a scale
for each output channel; activations are of int8, symmetric, or of uint8 where they are never negative. So every zero point is 0: zeros of
padding are zeros, and kernels correct for nothing.

Sources: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018; Wu et al.,
"Integer Quantization for Deep Learning Inference", 2020 (symmetric weights per channel).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from torch_hybrid_backend.core.precision import SEVEN_BITS
from torch_hybrid_backend.torch_private import OpOverload, quantized_operators

aten = torch.ops.aten
quantized = quantized_operators()

Apply = Callable[..., Any]

SIGNED = (-128, 127, torch.int8)
UNSIGNED = (0, 255, torch.uint8)
# Without -128: the range is symmetric.
WEIGHTS = (-127, 127, torch.int8)
WEIGHTS_OF_7_BITS = (*SEVEN_BITS, torch.int8)
# The scale of tensors that are zero everywhere, or nearly: a normal number, and its reciprocal is one too.
_LEAST_SCALE = 1e-30


def call(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`Apply` for tensors."""
    return operator(*args, **kwargs)


def _tensor(x: Any) -> torch.Tensor:
    value: torch.Tensor = x.meta["val"] if isinstance(x, Node) else x
    return value


def weight(apply: Apply, w: Any, axis: int, bits: int) -> Any:
    """A weight, quantized to 7 or 8 bits with a scale for each index of dimension `axis`, and dequantized.

    Weights of depthwise convolutions always have 8 bits. Their few products are not added up in bytes, and errors of few products do not
    average out.
    """
    value = _tensor(w)
    others = [d for d in range(value.dim()) if d != axis]
    is_depthwise = value.shape[1 - axis] == 1
    bounds = WEIGHTS_OF_7_BITS if bits == 7 and not is_depthwise else WEIGHTS
    scales = _scales(apply, value.dtype, apply(aten.amax.default, apply(aten.abs.default, w), others), bounds[1])
    # A fill of a known size: kernels see that it is zeros. (None would do for dequantizing, but not for inductor.)
    zeros = apply(aten.full.default, [value.shape[axis]], 0, dtype=torch.int64, device=value.device)
    narrow = apply(quantized.quantize_per_channel.default, w, scales, zeros, axis, *bounds)
    wide = apply(quantized.dequantize_per_channel.default, narrow, scales, zeros, axis, *bounds)
    return _as(apply, wide, value.dtype)


def tensor(apply: Apply, x: Any, low: float, high: float) -> Any:
    """An activation with values from low to high, by a calibration, quantized and dequantized; what lies beyond saturates."""
    bounds = UNSIGNED if low >= 0 else SIGNED
    scale = max(high, -low) / bounds[1] or 1.0
    narrow = apply(quantized.quantize_per_tensor.default, x, scale, 0, *bounds)
    return _as(apply, apply(quantized.dequantize_per_tensor.default, narrow, scale, 0, *bounds), _tensor(x).dtype)


def tensor_now(apply: Apply, x: Any, *, non_negative: bool = False) -> Any:
    """An activation quantized by the largest magnitude in it, and dequantized."""
    bounds = UNSIGNED if non_negative else SIGNED
    dtype = _tensor(x).dtype
    magnitude = x if non_negative else apply(aten.abs.default, x)
    scale = _scales(apply, dtype, apply(aten.amax.default, magnitude), bounds[1])
    zero = apply(aten.full_like.default, scale, 0, dtype=torch.int64)
    narrow = apply(quantized.quantize_per_tensor.tensor, x, scale, zero, *bounds)
    return _as(apply, apply(quantized.dequantize_per_tensor.tensor, narrow, scale, zero, *bounds), dtype)


def rows_now(apply: Apply, x: Any, *, non_negative: bool = False) -> Any:
    """An activation of which each row, along the last dimension, is quantized by the largest magnitude in it, and dequantized."""
    bounds = UNSIGNED if non_negative else SIGNED
    dtype = _tensor(x).dtype
    magnitude = x if non_negative else apply(aten.abs.default, x)
    scales = _scales(apply, dtype, apply(aten.amax.default, magnitude, [-1], True), bounds[1])
    zeros = apply(aten.full_like.default, scales, 0, dtype=torch.int64)
    narrow = apply(quantized.quantize_per_token.default, x, scales, zeros, *bounds)
    return apply(quantized.dequantize_per_token.default, narrow, scales, zeros, *bounds, dtype)


def _scales(apply: Apply, dtype: torch.dtype, largest: Any, levels: int) -> Any:
    largest = largest if dtype == torch.float32 else apply(aten._to_copy.default, largest, dtype=torch.float32)
    return apply(aten.clamp_min.default, apply(aten.div.Tensor, largest, float(levels)), _LEAST_SCALE)


def _as(apply: Apply, x: Any, dtype: torch.dtype) -> Any:
    return x if dtype == torch.float32 else apply(aten._to_copy.default, x, dtype=dtype)
