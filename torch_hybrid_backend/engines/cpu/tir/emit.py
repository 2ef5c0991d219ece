"""From a kernel as plain data to a TIR function."""

from __future__ import annotations

from typing import Any

from torch_hybrid_backend.engines.cpu.schedules import schedule_of
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, TirBuffer, argument, prim_func
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Kernel, MapKernel, RowKernel, ScatterKernel, counts_far, kernel_sizes
from torch_hybrid_backend.loops.layout import Layout
from torch_hybrid_backend.sizes.size import MAX_SIZE


def emit_kernel(kernel: Kernel, name: str, target: Target, *, emulates: bool = False) -> Any:
    """The kernel as a TIR function called `name`; its arguments are 1-D arrays, those it reads first, then sizes. `emulates`: dot products of
    AArch64 are written as arithmetic that every machine has, in the same loops.

    Raises ScheduleError where no schedule serves it, or the one that does has no such `schedule_rank`.
    """
    address, computes_float16 = "int64" if counts_far(kernel) else "int32", target.isa.computes_float16
    builder = Builder(kernel.schedule_rank, address, emulates=emulates, computes_float16=computes_float16)
    if builder.address == "int64" and not isinstance(kernel, MapKernel | RowKernel | ScatterKernel):
        raise ScheduleError(f"no schedule of a {type(kernel).__name__} counts beyond {MAX_SIZE} elements")
    arrays: dict[Buffer, tuple[TirBuffer, Layout]] = {}
    for number, arg in enumerate((*kernel.reads, *kernel.writes)):
        array = argument(arg.span, storage_dtype(arg.buffer.dtype), f"arg{number}")
        arrays[arg.buffer] = (array, arg.layout)
    sizes = [builder.argument_size(symbol) for symbol in kernel_sizes(kernel)]
    emit = schedule_of(kernel)
    if emit is None:
        raise ScheduleError(f"no schedule serves a {type(kernel).__name__}")
    body = emit(kernel, builder, Printer(builder, arrays), target)
    if kernel.schedule_rank >= builder.ways:
        raise ScheduleError(f"the schedule of this {type(kernel).__name__} has one way only")
    parameters = [*(array for array, _ in arrays.values()), *sizes]
    return prim_func(name, parameters, body, builder.llvm_helpers)
