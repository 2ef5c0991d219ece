"""The schedules: one rule a file, each an `emit(kernel, builder, printer, target) -> Stmt`; the first that serves a kernel's class is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_hybrid_backend.engines.tvm.cpu.kernels import (
    FusedConvKernel,
    PackedConvKernel,
    PackedMatMulKernel,
    UnpackedMatMulKernel,
)
from torch_hybrid_backend.engines.tvm.schedules.attention.rules import emit as attention
from torch_hybrid_backend.engines.tvm.schedules.convolution.fused import emit as fused_convolution
from torch_hybrid_backend.engines.tvm.schedules.convolution.rules import emit as convolution
from torch_hybrid_backend.engines.tvm.schedules.elementwise import emit as elementwise
from torch_hybrid_backend.engines.tvm.schedules.matmul.packed import emit as packed_matmul
from torch_hybrid_backend.engines.tvm.schedules.matmul.unpacked import emit as unpacked_matmul
from torch_hybrid_backend.engines.tvm.schedules.reduction.rows import emit as reduction
from torch_hybrid_backend.loops.kernels import AttentionKernel, Kernel, MapKernel, RowKernel

SCHEDULES: tuple[tuple[type[Kernel], Callable[..., Any]], ...] = (
    (MapKernel, elementwise),
    (RowKernel, reduction),
    (PackedMatMulKernel, packed_matmul),
    (UnpackedMatMulKernel, unpacked_matmul),
    (PackedConvKernel, convolution),
    (FusedConvKernel, fused_convolution),
    (AttentionKernel, attention),
)
