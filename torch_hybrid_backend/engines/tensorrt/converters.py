"""Layers that quantise and dequantise, of the operators that torch_tensorrt has no converters for. `adapter` alone imports this.

Graphs come from `integer_products.spell_out`: scales are numbers, or those of the channels of what is dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed
from torch.fx import Node
from torch_tensorrt._enums import dtype as trt_dtype
from torch_tensorrt.dynamo.conversion._TRTInterpreter import trt
from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor

from torch_hybrid_backend.engines.tensorrt.quantization import NARROW

quantized = torch.ops.quantized_decomposed
aten = torch.ops.aten


def converter_of(node: Node) -> Callable[..., Any] | None:
    """Our converter of a node of a lowered graph; None where torch_tensorrt's are to be asked. It is called with a context of theirs, a list
    that keeps the contents of constants until the engine is built, a name, and the node's arguments."""
    if node.target is aten._to_copy.default:
        types = [each.meta["val"].dtype for each in (node, *node.all_input_nodes) if "val" in each.meta]
        return _cast if any(dtype in NARROW for dtype in types) else None
    return _CONVERTERS.get(node.target)


def _cast(ctx: Any, kept: list[Any], name: str, x: Any, *, dtype: torch.dtype, **_: Any) -> Any:
    """To values of 8 bits and from them: numbers are what they stand for, at the scale 1."""
    x = get_trt_tensor(ctx, x, f"{name}_input")
    scale = _number(ctx, kept, 1.0, name)
    if dtype in NARROW:
        return _named(ctx.net.add_quantize(x, scale, _trt(dtype)), name)
    return _named(ctx.net.add_dequantize(x, scale, _trt(dtype)), name)


def _quantize(
    ctx: Any, kept: list[Any], name: str, x: Any, scale: float, zero: int, low: int, high: int, dtype: torch.dtype
) -> Any:
    x = get_trt_tensor(ctx, x, f"{name}_input")
    return _named(ctx.net.add_quantize(x, _number(ctx, kept, scale, name), _trt(dtype)), name)


def _dequantize(
    ctx: Any,
    kept: list[Any],
    name: str,
    x: Any,
    scale: float,
    zero: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Any:
    x = get_trt_tensor(ctx, x, f"{name}_input")
    return _named(ctx.net.add_dequantize(x, _number(ctx, kept, scale, name), _trt(out_dtype or torch.float32)), name)


def _dequantize_channels(
    ctx: Any,
    kept: list[Any],
    name: str,
    x: Any,
    scales: Any,
    zeros: Any,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Any:
    x, scales = get_trt_tensor(ctx, x, f"{name}_input"), get_trt_tensor(ctx, scales, f"{name}_scales")
    layer = ctx.net.add_dequantize(x, scales, _trt(out_dtype or torch.float32))
    layer.axis = axis
    return _named(layer, name)


_CONVERTERS: Mapping[object, Callable[..., Any]] = {
    quantized.quantize_per_tensor.default: _quantize,
    quantized.dequantize_per_tensor.default: _dequantize,
    quantized.dequantize_per_channel.default: _dequantize_channels,
}


def _number(ctx: Any, kept: list[Any], value: float, name: str) -> Any:
    content = np.array(value, dtype=np.float32)
    kept.append(content)
    layer = ctx.net.add_constant((), trt.Weights(content))
    layer.name = f"{name}_scale"
    return layer.get_output(0)


def _trt(dtype: torch.dtype) -> Any:
    return trt_dtype._from(dtype).to(trt.DataType)


def _named(layer: Any, name: str) -> Any:
    layer.name = name
    return layer.get_output(0)
