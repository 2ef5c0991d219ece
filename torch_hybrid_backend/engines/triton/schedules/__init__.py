"""The schedules: one for each class of kernel, each an `emit(kernel, printer, target) -> Launch` that writes a program's body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_hybrid_backend.engines.triton.schedules import attention, convolution, matmul, pointwise, reduction
from torch_hybrid_backend.loops.kernels import AttentionKernel, ConvKernel, Kernel, MapKernel, MatMulKernel, RowKernel

SCHEDULES: tuple[tuple[type[Kernel], Callable[..., Any]], ...] = (
    (MapKernel, pointwise.emit),
    (RowKernel, reduction.emit),
    (MatMulKernel, matmul.emit),
    (ConvKernel, convolution.emit),
    (AttentionKernel, attention.emit),
)
