"""Convolution by AMX: the products of `schedules/amx`, by tiles of pixels (`amx_pixels`), or gathered (`amx_gathered`) where channels are few
and narrower than float32.

Pattern: a weight in `AmxTiles`.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.schedules.convolution.amx_im2col import GatheredConvolution
from torch_hybrid_backend.engines.cpu.schedules.convolution.amx_pixels import TileConvolution
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.weights import AmxTiles
from torch_hybrid_backend.sizes.size import known_int


def emit(kernel: CpuConvKernel[AmxTiles], builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body."""
    gathers = FORMATS[kernel.weight.tile_format].gathers(known_int(kernel.x_vars[1].extent))
    return (GatheredConvolution if gathers else TileConvolution)(kernel, builder, printer, target).emit()
