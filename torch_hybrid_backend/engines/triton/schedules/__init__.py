"""The schedules, one for each class of kernel: `launch(kernel, target)` decides its tiles, `emit(kernel, printer, target, launch)` writes the
body of its program."""

from __future__ import annotations

from types import ModuleType

from torch_hybrid_backend.engines.triton.kernels import FlashKernel, KeyGradientKernel, QueryGradientKernel
from torch_hybrid_backend.engines.triton.schedules import (
    attention,
    attention_gradients,
    convolution,
    matmul,
    pointwise,
    reduction,
    scatter,
    stream_k,
)
from torch_hybrid_backend.engines.triton.schedules.tilings import (
    FixUpKernel,
    StreamMatMulKernel,
    TiledConvKernel,
    TiledMatMulKernel,
)
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.kernels import ConvKernel, Kernel, MapKernel, MatMulKernel, RowKernel, ScatterKernel

_SCHEDULES: dict[type[Kernel], ModuleType] = {
    MapKernel: pointwise,
    RowKernel: reduction,
    reduction.PartKernel: reduction,
    ScatterKernel: scatter,
    MatMulKernel: matmul,
    TiledMatMulKernel: matmul,
    StreamMatMulKernel: stream_k,
    FixUpKernel: stream_k,
    ConvKernel: convolution,
    TiledConvKernel: convolution,
    FlashKernel: attention,
    QueryGradientKernel: attention_gradients,
    KeyGradientKernel: attention_gradients,
}


def schedule_of(kernel: Kernel) -> ModuleType:
    """The module with the kernel's `launch` and `emit`. Raises ScheduleError where there is none."""
    found = _SCHEDULES.get(type(kernel))
    if found is None:
        raise ScheduleError(f"no schedule serves a {type(kernel).__name__}")
    return found
