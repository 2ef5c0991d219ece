"""The schedules: one rule a file, each an `emit(kernel, builder, printer, target) -> Stmt`; the first that serves a kernel's class is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_hybrid_backend.engines.tvm.schedules import (
    attention,
    conv_chain,
    convolution,
    elementwise,
    matmul,
    plain_matmul,
    reduction,
)
from torch_hybrid_backend.loops.kernels import (
    AttentionKernel,
    ConvChainKernel,
    ConvKernel,
    Kernel,
    MapKernel,
    MatMulKernel,
    PlainMatMulKernel,
    RowKernel,
)

SCHEDULES: tuple[tuple[type[Kernel], Callable[..., Any]], ...] = (
    (MapKernel, elementwise.emit),
    (RowKernel, reduction.emit),
    (MatMulKernel, matmul.emit),
    (PlainMatMulKernel, plain_matmul.emit),
    (ConvKernel, convolution.emit),
    (ConvChainKernel, conv_chain.emit),
    (AttentionKernel, attention.emit),
)
