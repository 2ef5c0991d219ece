"""The schedules: one rule a file, each an `emit(kernel, builder, printer, target) -> Stmt`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel, FusedConvKernel
from torch_hybrid_backend.engines.cpu.schedules import elementwise, recurrent, scatter, segments
from torch_hybrid_backend.engines.cpu.schedules.attention import rules as attention_rules
from torch_hybrid_backend.engines.cpu.schedules.convolution import amx as amx_convolution
from torch_hybrid_backend.engines.cpu.schedules.convolution import fused as fused_convolution
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules as convolution_rules
from torch_hybrid_backend.engines.cpu.schedules.matmul import amx as amx_matmul
from torch_hybrid_backend.engines.cpu.schedules.matmul import packed as packed_matmul
from torch_hybrid_backend.engines.cpu.schedules.matmul import row_pairs, weight_only_amx
from torch_hybrid_backend.engines.cpu.schedules.matmul import unpacked as unpacked_matmul
from torch_hybrid_backend.engines.cpu.schedules.matmul import weight_only as dequantized_matmul
from torch_hybrid_backend.engines.cpu.schedules.reduction import rows as reduction_rows
from torch_hybrid_backend.engines.cpu.weights import AmxTiles, InPlace, Panels, Quantized, Weight
from torch_hybrid_backend.loops.kernels import (
    AttentionKernel,
    Kernel,
    MapKernel,
    RecurrentKernel,
    RowKernel,
    ScatterKernel,
    SegmentKernel,
)

Schedule = Callable[..., Any]


def schedule_of(kernel: Kernel) -> Schedule | None:
    """The schedule that serves a kernel, by its class and its weight's form; None where none does."""
    match kernel:
        case MapKernel():
            return elementwise.emit
        case RowKernel():
            return reduction_rows.emit
        case ScatterKernel():
            return scatter.emit
        case SegmentKernel():
            return segments.emit
        case RecurrentKernel():
            return recurrent.emit
        case AttentionKernel():
            return attention_rules.emit
        case FusedConvKernel():
            return fused_convolution.emit
        case CpuMatMulKernel(weight=weight):
            return _matmul(weight)
        case CpuConvKernel(weight=weight):
            return amx_convolution.emit if isinstance(weight, AmxTiles) else convolution_rules.emit
    return None


def _matmul(weight: Weight) -> Schedule | None:
    match weight:
        case Panels(dot=DotProduct(rows=2)):
            return row_pairs.emit
        case Panels():
            return packed_matmul.emit
        case InPlace():
            return unpacked_matmul.emit
        case Quantized(tile_format=tile_format):
            return weight_only_amx.emit if tile_format else dequantized_matmul.emit
        case AmxTiles():
            return amx_matmul.emit
    return None
