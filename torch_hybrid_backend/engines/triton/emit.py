"""From a kernel as plain data to the text of a Triton program. Nothing here imports Triton."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.engines.triton.functions import DTYPES, FUNCTIONS
from torch_hybrid_backend.engines.triton.printer import Printer
from torch_hybrid_backend.engines.triton.schedules import schedule_of
from torch_hybrid_backend.engines.triton.source import Launch, Lines
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.ir import FLOAT8
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel as Triton's compiler wants it. `text`: a module whose function `name` is the kernel; `signature`: the types of the function's
    parameters by name, but those of `launch.constants`. `dtypes`: of the buffers among them."""

    name: str
    text: str
    signature: dict[str, str]
    dtypes: tuple[str, ...]
    launch: Launch


_HEAD = '''"""{title}"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
'''


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
    signature.update(dict.fromkeys(sizes.values(), "i32"))
    parameters = [*signature, *(f"{constant}: tl.constexpr" for constant in launch.constants)]
    functions = [FUNCTIONS[own] for own in FUNCTIONS if own in printer.functions]
    text = (
        _HEAD.format(title=f"A {type(kernel).__name__} over {tuple(str(v.extent) for v in kernel.domain)}.")
        + "\n".join(functions)
        + f"\n\n@triton.jit\ndef {name}({', '.join(parameters)}):\n{lines.text}\n"
    )
    dtypes = tuple("uint8" if a.buffer.dtype in FLOAT8 else a.buffer.dtype for a in printer.arguments)
    return Program(name, text, signature, dtypes, launch)
