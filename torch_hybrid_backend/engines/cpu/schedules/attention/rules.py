"""Attention: which of its schedules a kernel gets."""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel, Int8AttentionKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.schedules.attention.amx_bf16 import AmxBf16Attention
from torch_hybrid_backend.engines.cpu.schedules.attention.amx_bf16_split import AmxBf16SplitAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.amx_computed import AmxComputedAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.bf16 import Bf16Attention
from torch_hybrid_backend.engines.cpu.schedules.attention.decoding import DecodingAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.int8 import Int8Attention
from torch_hybrid_backend.engines.cpu.schedules.attention.tiled import TiledAttention
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.ir import Load
from torch_hybrid_backend.loops.kernels import AttentionKernel


def emit(kernel: AttentionKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body. An `AttentionKernel` multiplies in float32 or float64, a `Bf16AttentionKernel` in bfloat16, an `Int8AttentionKernel`
    in int8 and float32."""
    if isinstance(kernel, Int8AttentionKernel):
        return Int8Attention(kernel, builder, printer, target).emit()
    if isinstance(kernel, Bf16AttentionKernel):
        return _bf16_schedule(kernel)(kernel, builder, printer, target).emit()
    decoding = DecodingAttention(kernel, builder, printer, target)
    return decoding.emit() if decoding.serves() else TiledAttention(kernel, builder, printer, target).emit()


def _bf16_schedule(kernel: Bf16AttentionKernel) -> type[Bf16Attention]:
    if not kernel.format:
        return Bf16Attention
    if FORMATS[kernel.format].splits:
        return AmxBf16SplitAttention
    return AmxBf16Attention if isinstance(kernel.k, Load) else AmxComputedAttention
