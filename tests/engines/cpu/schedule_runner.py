"""Runs one kernel of a schedule, or a few statements, on torch tensors, through TVM directly (its own thread pool: tests only)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, argument, prim_func
from torch_hybrid_backend.engines.cpu.tir.pipeline import build
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, Kernel, kernel_sizes
from torch_hybrid_backend.loops.layout import Blocked, Layout, contiguous
from torch_hybrid_backend.sizes.size import Symbol, evaluate, symbol

HOST = Target.host()
# Narrower vectors, another number of cores and small caches: other tiles, and the same results. Runs wherever HOST runs.
NARROW = Target(HOST.mcpu, HOST.cpu, HOST.features, 8, 3, 16 << 10, 64 << 10)
# The schedules of NEON, by instructions that every machine has.
APART = Target(HOST.mcpu, HOST.cpu, ("asimd",), 4, 3, 16 << 10, 64 << 10)


def row_major(buffer: Buffer) -> Argument:
    return Argument(buffer, contiguous(buffer.shape))


def offsets(shape: tuple[int, ...], layout: Layout) -> torch.Tensor:
    """The offset of each element of a logical tensor, computed without the code under test."""
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
    """The module whose function `kernel` takes the arguments' 1-D arrays, and the sizes that it knows only at run time."""
    printer = printer_of(kernel, kernel.schedule_rank)
    numbers = [printer.builder.argument_size(symbol) for symbol in kernel_sizes(kernel)]
    arrays = [array for array, _ in printer.arguments.values()]  # a schedule may add its own
    body = emit(kernel, printer.builder, printer, target)
    function = prim_func("kernel", [*arrays, *numbers], body, printer.builder.llvm_helpers)
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
    return runner_of(kernel, emit, target)(inputs)


def runner_of(
    kernel: Kernel, emit: Emit, target: Target = HOST
) -> Callable[[Mapping[Buffer, torch.Tensor]], list[torch.Tensor]]:
    """`run_kernel`, compiled once. What sizes known only at run time are is seen in the tensors: each is a tensor's dimension."""
    function = compile_kernel(kernel, emit, target)["kernel"]

    def run(inputs: Mapping[Buffer, torch.Tensor]) -> list[torch.Tensor]:
        given = [inputs[arg.buffer] for arg in kernel.reads]
        pairs = [(arg.buffer.shape, tensor.shape) for arg, tensor in zip(kernel.reads, given, strict=True)]
        seen = {size: number for sizes, numbers in pairs for size, number in zip(sizes, numbers, strict=True)}
        values = {s.name: seen[symbol(s.name)] for s in kernel_sizes(kernel)}
        memory = [to_memory(t, layout_at(arg, tuple(t.shape))) for arg, t in zip(kernel.reads, given, strict=True)]
        shapes = [tuple(evaluate(size, values) for size in arg.buffer.shape) for arg in kernel.writes]
        layouts = [layout_at(arg, shape) for arg, shape in zip(kernel.writes, shapes, strict=True)]
        written = [
            torch.full((layout.span(shape),), 77, dtype=getattr(torch, arg.buffer.dtype))
            for arg, shape, layout in zip(kernel.writes, shapes, layouts, strict=True)
        ]
        function(*memory, *written, *values.values())
        return [w[offsets(shape, layout)] for w, shape, layout in zip(written, shapes, layouts, strict=True)]

    return run


def layout_at(argument: Argument, shape: tuple[int, ...]) -> Layout:
    """An argument's layout where its sizes are these numbers."""
    return contiguous(shape) if argument.layout == contiguous(argument.buffer.shape) else argument.layout
