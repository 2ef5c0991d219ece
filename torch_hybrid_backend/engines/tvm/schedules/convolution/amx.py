"""Convolution by AMX: the products of `schedules/amx`, by tiles of pixels (`amx_pixels`), or gathered (`amx_gathered`) where channels are few
and narrower than float32.

Pattern: a `TileConvKernel`.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.tvm.cpu.amx_formats import FORMATS
from torch_hybrid_backend.engines.tvm.cpu.kernels import TileConvKernel
from torch_hybrid_backend.engines.tvm.schedules.convolution.amx_gathered import GatheredConvolution
from torch_hybrid_backend.engines.tvm.schedules.convolution.amx_pixels import TileConvolution
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.tvm.tir.printer import Printer
from torch_hybrid_backend.sizes.size import known_int


def emit(kernel: TileConvKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body."""
    gathers = FORMATS[kernel.format].gathers(known_int(kernel.x_vars[1].extent))
    return (GatheredConvolution if gathers else TileConvolution)(kernel, builder, printer, target).emit()
