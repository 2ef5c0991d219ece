"""Verdicts on operators that make, move or read 8-bit values.

TensorRT quantizes explicitly, by layers, and symmetrically: int8, and float8_e4m3fn from sm_89 on.

Builds with TensorRT-RTX 1.5.0.114, for sm_75 to sm_121, showed:

- Products of int8 by int8 and of float8 become one `gemm` layer each. So do convolutions of float8.
- Convolutions of int8 fail to build ("MyelinCheckException: cudnn_impl.cpp:89"), also if values are pooled, sliced or joined before.
- If only weights are int8, they are dequantized in a matrix product's own kernel, and before a convolution's kernel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.tensorrt.installed import Installation, installation
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.graph.quantized import CASTS, operator_name
from torch_hybrid_backend.torch_private import OpOverload

aten = torch.ops.aten

NARROW = frozenset({torch.int8, torch.float8_e4m3fn})
FP8_CAPABILITY = (8, 9)
FIRST_RTX = (1, 5)  # 1.4 cannot build 8-bit layers: "cannot be quantized by input1"
_LARGEST_FP8 = 448.0
_FILLS = frozenset({aten.full.default, aten.full_like.default})
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default})
# Operators that move values of any dtype.
MOVES = frozenset(
    {
        aten._reshape_copy.default,
        aten._unsafe_view.default,
        aten.clone.default,
        aten.permute.default,
        aten.reshape.default,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
# Operators that select values. The builder makes an integer product even if they stand between a quantizer and the product.
_CHOOSE = frozenset(
    {
        operator.getitem,
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.expand.default,
        aten.flip.default,
        aten.index_select.default,
        aten.max_pool1d.default,
        aten.max_pool2d.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        aten.repeat.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.stack.default,
    }
)
_CONVOLUTIONS = frozenset({aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default})
# Names, with the overload if it is not the default.
_QUANTIZERS = frozenset(
    {
        "quantize_per_tensor",
        "quantize_per_tensor.tensor",
        "quantize_per_channel",
        "quantize_per_token",
        "dequantize_per_tensor",
        "dequantize_per_tensor.tensor",
        "dequantize_per_channel",
        "dequantize_per_token",
    }
)


def verdict_of(node: Node) -> Verdict | None:
    """The verdict on an operator that makes, moves or reads 8-bit values, or on a fill of zero points; None for other operators."""
    title = operator_name(node)
    if title is not None:
        return _quantizer_verdict(node, title)
    if _is_zero(node) and node.users and all(_is_zero_point(node, user) for user in node.users):
        return Supported()
    if node.target in _CONVOLUTIONS:
        return _convolution_verdict(node)
    made, read = dtype_of(node), dtype_of(node.args[0]) if node.args else None
    if node.target in MOVES and made in NARROW:
        return _device_verdict(node)
    if node.target not in CASTS or made is None or read is None:
        return None
    if made is torch.float8_e4m3fn:
        if not _is_clamped(node.args[0]):
            why = "PyTorch makes NaN of what float8 cannot hold, TensorRT the largest value: it must be clamped first"
            return Refused(Reason.ARGUMENT, why)
        return _device_verdict(node)
    return _device_verdict(node) if read in NARROW and made.is_floating_point else None


def _quantizer_verdict(node: Node, title: str) -> Verdict:
    if title not in _QUANTIZERS:
        return Refused(Reason.UNKNOWN_OPERATOR, f"TensorRT has no layer for {node.target}")
    arguments = arguments_of(node)
    dtype = arguments["dtype"]
    if dtype not in NARROW:
        return Refused(Reason.DTYPE, f"{node.target} is of {dtype}; TensorRT quantizes to int8 and float8_e4m3fn")
    zero_point = arguments.get("zero_point", arguments.get("zero_points"))
    if not (zero_point is None or _is_zero(zero_point)):
        known = isinstance(zero_point, int) or dtype_of(zero_point) is None
        what = f"it is {zero_point}" if known else "whether it is 0 is not known"
        return Refused(Reason.ARGUMENT, f"the zero point of {node.target} must be 0 in TensorRT; {what}")
    limits = arguments["quant_min"], arguments["quant_max"]
    if title.startswith("quantize") and dtype is torch.int8 and limits != (-128, 127):
        return Refused(
            Reason.ARGUMENT, f"{node.target} clamps to {limits[0]} and {limits[1]}, TensorRT to -128 and 127"
        )
    return _device_verdict(node)


def _device_verdict(node: Node) -> Verdict:
    if is_rtx_before(FIRST_RTX):
        why = f"TensorRT-RTX builds engines with values of 8 bits from {'.'.join(map(str, FIRST_RTX))} on"
        return Refused(Reason.UNSUPPORTED, why)
    values = [node, *node.all_input_nodes]
    if not any(dtype_of(each) is torch.float8_e4m3fn for each in values):
        return Supported()
    value = node.meta["val"]
    index = value.device.index if value.device.type == "cuda" else None
    found = torch.cuda.get_device_capability(index)
    if found >= FP8_CAPABILITY:
        return Supported()
    return Refused(Reason.UNSUPPORTED, f"float8 needs sm_89 or later; this GPU is sm_{found[0]}{found[1]}")


def _convolution_verdict(node: Node) -> Verdict | None:
    """Refuse convolutions of int8 activations for TensorRT-RTX, whose builder fails for these."""
    if not is_rtx_before((math.inf,)):
        return None
    if not _reads_int8(node.args[0]):
        return None
    return Refused(Reason.UNSUPPORTED, f"TensorRT-RTX has no {node.target} of int8 activations, only matrix products")


def is_rtx_before(version: tuple[float, ...]) -> bool:
    """True if TensorRT-RTX is installed, in an earlier version than this."""
    found = installation()
    if not isinstance(found, Installation) or found.flavour.module != "tensorrt_rtx":
        return False
    numbers = [int(part) for part in found.tensorrt.split(".") if part.isdigit()]
    return tuple(numbers) < version


def _reads_int8(value: object) -> bool:
    """True if a value was dequantized from int8, and only moved or selected since. The builder does that with the integers."""
    left = [value]
    while left:
        each = left.pop()
        if not isinstance(each, Node):
            continue
        if operator_name(each) is not None and dtype_of(each.args[0]) is torch.int8:
            return True
        if each.target in MOVES or each.target in CASTS or each.target in _CHOOSE:
            left += each.all_input_nodes
    return False


def _is_clamped(value: object) -> bool:
    if not isinstance(value, Node) or value.target is not aten.clamp.default:
        return False
    limits = [*value.args[1:], *value.kwargs.values()]
    return len(limits) == 2 and all(isinstance(each, int | float) and abs(each) <= _LARGEST_FP8 for each in limits)


def _is_zero(value: object) -> bool:
    """True if a zero point is known to be 0: it is a number, a fill or a constant."""
    if not isinstance(value, Node):
        return isinstance(value, int) and value == 0
    if value.op == "get_attr":
        module = value.graph.owning_module
        constant = operator.attrgetter(str(value.target))(module) if module is not None else None
        return (
            isinstance(constant, torch.Tensor)
            and not isinstance(constant, torch.nn.Parameter)
            and not bool(constant.any())
        )
    dtype = dtype_of(value)
    if dtype is None or dtype.is_floating_point:
        return False
    return value.target in _ZEROS or (value.target in _FILLS and bool(value.args[1] == 0))


def _is_zero_point(value: Node, user: Node) -> bool:
    if operator_name(user) is None:
        return False
    others = [given for name, given in arguments_of(user).items() if not name.startswith("zero_point")]
    return value not in others


def arguments_of(node: Node) -> Mapping[str, Any]:
    """A quantizer's arguments by name."""
    assert isinstance(node.target, OpOverload)
    names = [each.name for each in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def dtype_of(value: object) -> torch.dtype | None:
    """The dtype of the tensor that a node makes; None for other values."""
    found = value.meta.get("val") if isinstance(value, Node) else None
    return found.dtype if isinstance(found, torch.Tensor) else None


def zero_points(region: Region) -> dict[int, torch.Tensor]:
    """Position -> zeros, for the inputs of a region that are only zero points. They are 0 in every region that the engine takes.

    Raises CompileError if the number of zero points is known only at run time, as constants have a fixed size."""
    found = {}
    for position, node in enumerate(region.graph_module.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.users and all(_is_zero_point(node, user) for user in node.users):
            if not all(isinstance(size, int) for size in value.shape):
                raise CompileError(f"how many zero points {node.name} has is known only at run time")
            # On the CPU, whatever the user's default device is: the request takes the bytes.
            found[position] = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
    return found
