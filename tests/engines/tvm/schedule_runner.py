"""Runs one kernel of a schedule, or a few statements, on torch tensors, through TVM directly (its own thread pool: tests only)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_hybrid_backend.engines.tvm.target import Target, tvm_target
from torch_hybrid_backend.engines.tvm.tir.builder import Builder, argument, prim_func
from torch_hybrid_backend.engines.tvm.tir.pipeline import build
from torch_hybrid_backend.engines.tvm.tir.printer import Printer
from torch_hybrid_backend.engines.tvm.tir.storage import storage_dtype
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Kernel
from torch_hybrid_backend.loops.layout import Blocked, Layout, contiguous
from torch_hybrid_backend.sizes.size import Symbol

HOST = Target.host()
# Narrower vectors, another number of cores and small caches: other tiles, and the same results. Runs wherever HOST runs.
NARROW = Target(HOST.mcpu, HOST.cpu, HOST.features, 8, 3, 16 << 10, 64 << 10)


def row_major(buffer: Buffer) -> Argument:
    return Argument(buffer, contiguous(buffer.shape))


def offsets(shape: tuple[int, ...], layout: Layout) -> torch.Tensor:
    """Where each element of a logical tensor lies, computed without the code under test."""
    if not isinstance(layout, Blocked):
        total = torch.zeros(shape, dtype=torch.int64)
        for dim, stride in enumerate(layout.strides):
            total += (torch.arange(shape[dim]) * stride).view(-1, *[1] * (len(shape) - dim - 1))
        return total
    blocks = -(-shape[1] // layout.block)
    physical = torch.arange(layout.span(shape))
    blocked = physical.view(shape[0], blocks, *shape[2:], layout.block).movedim(-1, 2)
    return blocked.reshape(shape[0], blocks * layout.block, *shape[2:])[:, : shape[1]]


def to_memory(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The 1-D array that holds a logical tensor; padding holds NaN where the dtype has one."""
    shape = tuple(tensor.shape)
    memory = torch.full((layout.span(shape),), float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype)
    memory[offsets(shape, layout)] = tensor
    return memory


Emit = Callable[[Any, Builder, Printer, Target], Any]


def printer_of(kernel: Kernel, schedule_rank: int = 0) -> Printer:
    """A printer, with a builder of its own, that knows the kernel's arguments."""
    arrays: dict[Buffer, tuple[Any, Layout]] = {}
    for number, arg in enumerate((*kernel.reads, *kernel.writes)):
        array = argument(arg.span, storage_dtype(arg.buffer.dtype), f"arg{number}")
        arrays[arg.buffer] = (array, arg.layout)
    return Printer(Builder(schedule_rank), arrays)


def compile_kernel(kernel: Kernel, emit: Emit, target: Target = HOST) -> Any:
    """The module whose function `kernel` takes the arguments' 1-D arrays."""
    printer = printer_of(kernel, kernel.schedule_rank)
    body = emit(kernel, printer.builder, printer, target)
    function = prim_func(
        "kernel", [array for array, _ in printer.arguments.values()], body, printer.builder.llvm_helpers
    )
    return build("kernel", function, tvm_target(target))


def run_body(body: Callable[..., Any], *memory: torch.Tensor, **sizes: int) -> None:
    """Runs the statement `body(builder, array, ...)` on 1-D tensors, which it may write. `sizes`: those it knows at run time only."""
    builder = Builder()
    arrays = [argument(t.numel(), storage_dtype(str(t.dtype).removeprefix("torch.")), "a") for t in memory]
    numbers = [builder.argument_size(Symbol(name, size)) for name, size in sizes.items()]
    statement = body(builder, *arrays)
    function = prim_func("body", [*arrays, *numbers], statement, builder.llvm_helpers)
    build("body", function, tvm_target(HOST))["body"](*memory, *sizes.values())


def run_kernel(
    kernel: Kernel, emit: Emit, inputs: Mapping[Buffer, torch.Tensor], target: Target = HOST
) -> list[torch.Tensor]:
    """The logical tensors the kernel writes, given those it reads."""
    function = compile_kernel(kernel, emit, target)["kernel"]
    memory = [to_memory(inputs[arg.buffer], arg.layout) for arg in kernel.reads]
    written = [torch.full((arg.span,), 77, dtype=getattr(torch, arg.buffer.dtype)) for arg in kernel.writes]
    function(*memory, *written)
    return [w[offsets(arg.buffer.shape, arg.layout)] for w, arg in zip(written, kernel.writes, strict=True)]
