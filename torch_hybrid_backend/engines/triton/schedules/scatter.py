"""Scatter: one program for each block of points, each of which is combined with its place in memory by an atomic operation.

Points run in the order of the domain, so that neighbours read and, where the last dimension is not the one that data index, write side by side.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.triton.printer import Printer, Tile
from torch_hybrid_backend.engines.triton.schedules.pointwise import flat_launch
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, flattened, program_start
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.kernels import ScatterKernel


def launch(kernel: ScatterKernel, target: Target) -> Launch:
    return flat_launch(kernel, kernel.domain, target)


def emit(kernel: ScatterKernel, printer: Printer, target: Target, launch: Launch) -> None:
    flat, env = flattened(kernel.domain, "i")
    tile = Tile(("BLOCK",))
    with (
        axis(printer, tile, 0, flat, f"{program_start(printer)} * BLOCK", launch.constants["BLOCK"]) as bounds,
        printer.over(tile, env, bounds),
    ):
        printer.combine(kernel.store, kernel.combiner)
