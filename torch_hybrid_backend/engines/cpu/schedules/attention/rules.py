"""Attention: which of its schedules a kernel gets."""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import ByteAttentionKernel, WordAttentionKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.schedules.attention.amx_bf16 import TileAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.amx_bf16_split import SplitAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.amx_computed import RowAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.bf16 import WordAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.decoding import DecodingAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.int8 import ByteAttention
from torch_hybrid_backend.engines.cpu.schedules.attention.tiled import TiledAttention
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.ir import Load
from torch_hybrid_backend.loops.kernels import AttentionKernel


def emit(kernel: AttentionKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body. float32, float64, or bfloat16 and float16 computed in float32; a `WordAttentionKernel` by products of bfloat16, a
    `ByteAttentionKernel` by products of bytes and of float32."""
    if isinstance(kernel, ByteAttentionKernel):
        return ByteAttention(kernel, builder, printer, target).emit()
    if isinstance(kernel, WordAttentionKernel):
        return _by_words(kernel)(kernel, builder, printer, target).emit()
    decoding = DecodingAttention(kernel, builder, printer, target)
    return decoding.emit() if decoding.serves() else TiledAttention(kernel, builder, printer, target).emit()


def _by_words(kernel: WordAttentionKernel) -> type[WordAttention]:
    if not kernel.format:
        return WordAttention
    if FORMATS[kernel.format].splits:
        return SplitAttention
    return TileAttention if isinstance(kernel.k, Load) else RowAttention
