"""From a kernel as plain data to the text of a Triton program. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.engines.triton.functions import DTYPES, texts
from torch_hybrid_backend.engines.triton.printer import Printer
from torch_hybrid_backend.engines.triton.schedules import schedule_of
from torch_hybrid_backend.engines.triton.schedules.boxes import DESCRIPTOR_BYTES
from torch_hybrid_backend.engines.triton.source import Launch, Lines
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes
from torch_hybrid_backend.loops.layout import Strided
from torch_hybrid_backend.sizes.size import Symbol, size_hint, symbols


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel as Triton's compiler wants it. `text`: a module whose function `name` is the kernel; `signature`: the types of the function's
    parameters by name, but those of `launch.constants`. `scratch_bytes`: of memory that each program needs beside them."""

    name: str
    text: str
    signature: dict[str, str]
    launch: Launch
    scratch_bytes: int


_HEAD = '''"""{title}"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
'''

# Triton sees from `n // 16 * 16` alone that rows begin where 16 bytes can be read at once.
_EITHER = '''

@triton.jit
def {name}({parameters}):
    """Both ways in one program: rows of whole multiples of 16 elements are read and written 16 bytes at once."""
    if {test}:
        {body}({multiples})
    else:
        {body}({arguments})
'''


def row_sizes(kernel: Kernel) -> list[Symbol]:
    """The sizes known only at run time that decide whether rows, which lie one behind the other, begin at multiples of 16 elements: those of
    the dimension that runs through memory element by element. Of the largest arguments: what is read of others hardly counts."""
    arguments = (*kernel.reads, *kernel.writes)
    most = max(size_hint(argument.span) for argument in arguments)
    extents = [
        extent
        for argument in arguments
        if isinstance(argument.layout, Strided) and 2 * size_hint(argument.span) > most
        for extent, stride in zip(argument.buffer.shape, argument.layout.strides, strict=True)
        if stride == 1
    ]
    return symbols(extent for extent in extents if extent % 16 != 0)


def emit_kernel(kernel: Kernel, name: str, target: Target) -> Program:
    """The kernel as a function called `name`; its parameters are what it reads, what it writes, then sizes.

    Raises ScheduleError where no schedule serves it.
    """
    sizes = {symbol: f"n{i}" for i, symbol in enumerate(kernel_sizes(kernel))}
    lines = Lines()
    printer = Printer(lines, kernel.reads, kernel.writes, sizes)
    schedule = schedule_of(kernel)
    launch: Launch = schedule.launch(kernel, target)
    schedule.emit(kernel, printer, target, launch)
    types = [f"{'' if a.buffer.by_value else '*'}{DTYPES[a.buffer.dtype][1]}" for a in printer.arguments]
    signature = dict(zip(printer.names, types, strict=True))
    signature.update((name, "i64" if symbol.is_wide else "i32") for symbol, name in sizes.items())
    parameters = [*signature, *(f"{constant}: tl.constexpr" for constant in launch.constants)]
    aligned = [sizes[symbol] for symbol in row_sizes(kernel)]
    body = f"{name}_body" if aligned else name
    text = (
        _HEAD.format(title=f"A {type(kernel).__name__} over {tuple(str(v.extent) for v in kernel.domain)}.")
        + "\n".join(texts(printer.functions))
        + f"\n\n@triton.jit\ndef {body}({', '.join(parameters)}):\n{lines.text}\n"
    )
    if aligned:
        arguments = [*signature, *launch.constants]
        multiples = [f"{argument} // 16 * 16" if argument in aligned else argument for argument in arguments]
        text += _EITHER.format(
            name=name,
            parameters=", ".join(parameters),
            test=" and ".join(f"{size} % 16 == 0" for size in aligned),
            body=body,
            multiples=", ".join(multiples),
            arguments=", ".join(arguments),
        )
    return Program(name, text, signature, launch, DESCRIPTOR_BYTES * printer.descriptors)
