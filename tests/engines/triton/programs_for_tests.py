"""Runs one kernel's program by Triton's interpreter, with the tiles that it has on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from tests.engines.cpu.schedule_runner import offsets, to_memory
from torch_hybrid_backend.engines.triton.emit import Program, emit_kernel
from torch_hybrid_backend.engines.triton.interpreted import interpretable
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Kernel

# A Hopper with few multiprocessors, so that small tensors are enough work for it; and none, with large tiles.
HOPPER = Target(90, 4, is_interpreted=True)
_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)  # as programs take them
TARGETS = {"hopper": HOPPER, "large tiles": INTERPRETER}


def run_program(
    kernel: Kernel, inputs: Mapping[Buffer, torch.Tensor], target: Target = HOPPER, sizes: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """The logical tensors the kernel writes, given those it reads. Nothing but those may be written. One that is given too keeps what is not
    written."""
    program = emit_kernel(kernel, "kernel", target)
    memory = [to_memory(inputs[arg.buffer], arg.layout) for arg in kernel.reads]
    written = [
        to_memory(inputs[arg.buffer], arg.layout)
        if arg.buffer in inputs
        else torch.full((arg.span,), 77).to(getattr(torch, arg.buffer.dtype))
        for arg in kernel.writes
    ]
    launch(program, [*memory, *written], sizes)
    return [w[offsets(arg.buffer.shape, arg.layout)] for w, arg in zip(written, kernel.writes, strict=True)]


def launch(program: Program, tensors: list[torch.Tensor], sizes: tuple[int, ...] = ()) -> None:
    """Run a program on tensors' memory."""
    grid = program.launch.grid
    tensors = [t.view(torch.uint8) if t.dtype in _AS_BYTES else t for t in tensors]
    with np.errstate(all="ignore"):
        interpretable(program.text, program.name)[grid](*tensors, *sizes, **program.launch.constants)
