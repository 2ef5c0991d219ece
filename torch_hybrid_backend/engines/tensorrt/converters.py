"""Converters for operators that torch_tensorrt lacks, or converts wrongly: quantizers, casts of 8-bit values, copies, arange and gather.

Only `adapter` imports this module. In its graphs, which come from `integer_products.factor_out_scales`, a scale is a number, or belongs to a
channel of a value that is dequantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch_tensorrt._enums import dtype as trt_dtype
from torch_tensorrt.dynamo.conversion._TRTInterpreter import trt
from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor

from torch_hybrid_backend.engines.tensorrt.quantization import NARROW
from torch_hybrid_backend.torch_private import quantized_operators

quantized = quantized_operators()
aten = torch.ops.aten


def converter_of(node: Node) -> Callable[..., Any] | None:
    """This package's converter of a node of a lowered graph; None if torch_tensorrt's converter is right.

    A converter takes torch_tensorrt's context, a list, a name, and the node's arguments. The list keeps the contents of constants until the
    engine is built."""
    if node.target is aten._to_copy.default:
        types = [each.meta["val"].dtype for each in (node, *node.all_input_nodes) if "val" in each.meta]
        if any(dtype in NARROW for dtype in types):
            return _cast
    if node.target in (aten._to_copy.default, aten.clone.default):
        return _copy if _copies_dynamic_input(node) else None
    if node.target is aten.arange.start_step:
        return _arange if any(isinstance(argument, Node) for argument in node.args) else None
    if node.target is aten.gather.default:
        return _gather if any(_has_unknown_size(source) for source in node.all_input_nodes) else None
    return _CONVERTERS.get(node.target)


def _has_unknown_size(node: Node) -> bool:
    return any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)


def _copies_dynamic_input(node: Node) -> bool:
    """True if a node copies an input with sizes known only at run time. torch_tensorrt's converter for copies of inputs does not take these."""
    (source,) = node.all_input_nodes
    return source.op == "placeholder" and _has_unknown_size(source)


def _copy(ctx: Any, kept: list[Any], name: str, x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = get_trt_tensor(ctx, x, f"{name}_input")
    return _named(ctx.net.add_identity(x) if dtype is None else ctx.net.add_cast(x, _trt(dtype)), name)


def _gather(ctx: Any, kept: list[Any], name: str, x: Any, dim: int, index: Any, **_: Any) -> Any:
    """Convert a gather; torch_tensorrt's converter takes no sizes known only at run time."""
    layer = ctx.net.add_gather_v2(
        *(get_trt_tensor(ctx, each, f"{name}_input") for each in (x, index)), trt.GatherMode.ELEMENT
    )
    layer.axis = dim % len(x.shape)
    return _named(layer, name)


def _arange(ctx: Any, kept: list[Any], name: str, start: int, count: Any, step: int = 1, **_: Any) -> Any:
    """Convert arange(0, count) in int64, from which `decompositions` makes all others."""
    shape = ctx.net.add_shuffle(ctx.net.add_cast(get_trt_tensor(ctx, count, f"{name}_count"), trt.int64).get_output(0))
    shape.reshape_dims = (1,)
    layer = ctx.net.add_fill((1,), trt.FillOperation.LINSPACE, trt.int64)
    layer.set_input(0, shape.get_output(0))
    for place, content in ((1, np.array(start, np.int64)), (2, np.array([step], np.int64))):
        kept.append(content)
        layer.set_input(place, ctx.net.add_constant(content.shape, trt.Weights(content)).get_output(0))
    return _named(layer, name)


def _cast(ctx: Any, kept: list[Any], name: str, x: Any, *, dtype: torch.dtype, **_: Any) -> Any:
    """Convert a cast to or from an 8-bit dtype: quantize or dequantize with scale 1."""
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
