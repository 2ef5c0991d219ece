"""The schedules: one rule a file, each an `emit(kernel, builder, printer, target) -> Stmt`; the first that serves a kernel's class is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_hybrid_backend.engines.cpu.kernels import (
    DequantizedMatMulKernel,
    FusedConvKernel,
    PackedConvKernel,
    PackedMatMulKernel,
    TileConvKernel,
    TileDequantizedMatMulKernel,
    TileMatMulKernel,
    UnpackedMatMulKernel,
)
from torch_hybrid_backend.engines.cpu.schedules import elementwise
from torch_hybrid_backend.engines.cpu.schedules.attention import rules as attention_rules
from torch_hybrid_backend.engines.cpu.schedules.convolution import amx as amx_convolution
from torch_hybrid_backend.engines.cpu.schedules.convolution import fused as fused_convolution
from torch_hybrid_backend.engines.cpu.schedules.convolution import rules as convolution_rules
from torch_hybrid_backend.engines.cpu.schedules.matmul import amx as amx_matmul
from torch_hybrid_backend.engines.cpu.schedules.matmul import packed as packed_matmul
from torch_hybrid_backend.engines.cpu.schedules.matmul import unpacked as unpacked_matmul
from torch_hybrid_backend.engines.cpu.schedules.matmul import weight_only as dequantized_matmul
from torch_hybrid_backend.engines.cpu.schedules.matmul import weight_only_amx
from torch_hybrid_backend.engines.cpu.schedules.reduction import rows as reduction_rows
from torch_hybrid_backend.loops.kernels import AttentionKernel, Kernel, MapKernel, RowKernel

SCHEDULES: tuple[tuple[type[Kernel], Callable[..., Any]], ...] = (
    (MapKernel, elementwise.emit),
    (RowKernel, reduction_rows.emit),
    (PackedMatMulKernel, packed_matmul.emit),
    (UnpackedMatMulKernel, unpacked_matmul.emit),
    (TileDequantizedMatMulKernel, weight_only_amx.emit),
    (DequantizedMatMulKernel, dequantized_matmul.emit),
    (TileMatMulKernel, amx_matmul.emit),
    (PackedConvKernel, convolution_rules.emit),
    (FusedConvKernel, fused_convolution.emit),
    (TileConvKernel, amx_convolution.emit),
    (AttentionKernel, attention_rules.emit),
)
