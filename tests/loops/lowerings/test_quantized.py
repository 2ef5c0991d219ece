"""The operators `quantized_decomposed`, lowered, against PyTorch's own: integers are equal bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from loops.check import check, sample

quantized = torch.ops.quantized_decomposed
RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-32768, 32767)}


def _halfway() -> torch.Tensor:
    """Multiples of a quarter: halves, which are rounded to even, among them; what saturates, infinities and both zeros."""
    specials = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e9, -1e9])
    return torch.cat([torch.arange(-1200, 1200) * 0.25, specials]).reshape(2, 1203)


@pytest.mark.parametrize("dtype", RANGES, ids=str)
@pytest.mark.parametrize(("scale", "zero_point"), [(0.5, 0), (0.1, 3), (1 / 3, -7), (7e-3, 0)])
def test_per_tensor(dtype: torch.dtype, scale: float, zero_point: int) -> None:
    """A tensor with one scale is quantized to PyTorch's integers, ties, saturation and infinities included, and dequantized to the same
    numbers, whether scale and zero point are literals or tensors."""
    bounds = RANGES[dtype]
    zero_point = max(zero_point, bounds[0])
    x = _halfway() * (1.0 if scale >= 0.1 else 0.01)
    scales, zero_points = torch.tensor(scale, dtype=torch.float64), torch.tensor([zero_point])
    limits = tuple(torch.tensor(bound) for bound in bounds)
    literals, tensors = (scale, zero_point, *bounds), (scales, zero_points, *bounds)
    check(lambda x: quantized.quantize_per_tensor.default(x, *literals, dtype), x)
    check(lambda x, s, z: quantized.quantize_per_tensor.tensor(x, s, z, *bounds, dtype), x, *tensors[:2])
    check(lambda x, s, z, a, b: quantized.quantize_per_tensor.tensor2(x, s, z, a, b, dtype), x, *tensors[:2], *limits)
    check(lambda x: quantized.quantize_per_tensor.default(x, *literals, dtype), x.bfloat16())
    q = quantized.quantize_per_tensor.default(x, *literals, dtype)
    check(lambda q: quantized.dequantize_per_tensor.default(q, *literals, dtype), q)
    check(lambda q: quantized.dequantize_per_tensor.default(q, *literals, dtype, out_dtype=torch.bfloat16), q)
    check(lambda q, s, z: quantized.dequantize_per_tensor.tensor(q, s, z, *bounds, dtype), q, *tensors[:2])
    check(lambda q, s, z, a, b: quantized.dequantize_per_tensor.tensor2(q, s, z, a, b, dtype), q, *tensors[:2], *limits)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_per_channel(axis: int, scale_dtype: torch.dtype) -> None:
    """Each index of a dimension has a scale and a zero point of its own; there may be no zero points."""
    x = sample(5, 4, 6, low=-20, high=20)
    count = x.shape[axis]
    scales = torch.linspace(0.05, 0.3, count, dtype=scale_dtype)
    zero_points = torch.arange(count)
    if axis < 0:  # PyTorch's own takes a negative axis for dequantizing only
        q = sample(5, 4, 6, dtype=torch.int8, low=-128, high=127)
    else:
        check(
            lambda x, s, z: quantized.quantize_per_channel.default(x, s, z, axis, -128, 127, torch.int8),
            x,
            scales,
            zero_points,
        )
        q = quantized.quantize_per_channel.default(x, scales, zero_points, axis, -128, 127, torch.int8)
    check(
        lambda q, s, z: quantized.dequantize_per_channel.default(q, s, z, axis, -128, 127, torch.int8),
        q,
        scales,
        zero_points,
    )
    check(lambda q, s: quantized.dequantize_per_channel.default(q, s, None, axis, -128, 127, torch.int8), q, scales)


@pytest.mark.parametrize("zero_dtype", [torch.int64, torch.float32, torch.float64], ids=str)
def test_per_token(zero_dtype: torch.dtype) -> None:
    """Each row has a scale; the zero point is added before rounding."""
    x = sample(6, 32, low=-4, high=4)
    scales, zero_points = sample(6, 1, low=0.01, high=0.05), sample(6, 1, low=-9, high=9).to(zero_dtype)
    bounds = (-128, 127, torch.int8)
    check(lambda x, s, z: quantized.quantize_per_token.default(x, s, z, *bounds), x, scales, zero_points)
    check(
        lambda x, s, z: quantized.quantize_per_token.default(x, s, z, *bounds),
        x.reshape(2, 3, 32),
        scales.reshape(2, 3, 1),
        zero_points.reshape(2, 3, 1),
    )
    q = sample(6, 32, dtype=torch.int8, low=-128, high=127)
    check(
        lambda q, s, z: quantized.dequantize_per_token.default(q, s, z, *bounds, torch.float32), q, scales, zero_points
    )


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("zero_dtype", [torch.int64, torch.float32], ids=str)
def test_per_group(zero_dtype: torch.dtype, size: int) -> None:
    """Each few neighbours in a row have a scale; there may be no zero points. What is dequantized is between its bounds, as graphs promise."""
    x, q = sample(6, 32, low=-4, high=4), sample(6, 32, dtype=torch.int8, low=-8, high=7)
    scales, zero_points = sample(6, 32 // size, low=0.01, high=0.05), sample(6, 32 // size, low=-9, high=9)
    zero_points = zero_points.to(zero_dtype)
    quantize, dequantize = quantized.quantize_per_channel_group.default, quantized.dequantize_per_channel_group.default
    check(lambda x, s, z: quantize(x, s, z, -8, 7, torch.int8, size), x, scales, zero_points)
    check(lambda q, s, z: dequantize(q, s, z, -8, 7, torch.int8, size, torch.float32), q, scales, zero_points)
    check(lambda q, s: dequantize(q, s, None, -8, 7, torch.int8, size, torch.float32), q, scales)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: quantized.choose_qparams.tensor(x, 0, 255, 1e-5, torch.uint8),
        lambda x: quantized.choose_qparams.tensor(x, -128, 127, 1e-5, torch.int8),
        lambda x: quantized.choose_qparams_symmetric.tensor(x, -127, 127, 1e-5, torch.int8),
        lambda x: quantized.choose_qparams_symmetric.tensor(x, 0, 255, 1e-5, torch.uint8),
        lambda x: quantized.choose_qparams_per_token_asymmetric.default(x, torch.int8),
    ],
)
@pytest.mark.parametrize("low", [-3, 0.5, 0])
def test_scales_at_run_time(choose: Callable[[torch.Tensor], object], low: float) -> None:
    """Scales and zero points of a tensor or of its rows are PyTorch's, of values of one sign and of zeros too."""
    check(choose, sample(4, 9, low=low, high=5 if low else 0))


def test_casts_that_are_kept_apart() -> None:
    """`convert_element_type.no_fuse` is a cast."""
    check(lambda x: quantized.convert_element_type.no_fuse(x, torch.bfloat16), sample(3, 5))
