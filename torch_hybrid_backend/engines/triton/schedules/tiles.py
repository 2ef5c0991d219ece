"""Tiles of flattened loops: what the schedules have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.sizes.size import Dim, ceil_div, product, size_hint


def power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def flattened(variables: Sequence[LoopVar], name: str) -> tuple[LoopVar, dict[LoopVar, Index]]:
    """A loop variable for several, the last of which runs fastest, and each of them in terms of it."""
    flat = LoopVar(name, product([v.extent for v in variables]))
    index = index_of(flat)
    env: dict[LoopVar, Index] = {}
    step: Dim = 1
    for variable in reversed(variables):
        env[variable] = as_index(0) if variable.extent == 1 else (index // step) % variable.extent
        step = step * variable.extent
    return flat, env


def blocks(extent: Dim, block: int) -> Dim:
    """The number of blocks that cover an extent."""
    return ceil_div(extent, block)


def block_for(extent: Dim, most: int, least: int = 1) -> int:
    """A power of two: as much as there is of the extent, within bounds."""
    return max(least, min(1 << (max(most, 1).bit_length() - 1), power_of_2(max(1, size_hint(extent)))))


def program_start(printer: Printer) -> str:
    """The number of the program along the grid's first axis."""
    return f"tl.program_id(0){'.to(tl.int64)' if printer.is_wide else ''}"


@contextmanager
def axis(
    printer: Printer, tile: Tile, dim: int, variable: LoopVar, start: str, block: int
) -> Iterator[dict[int, Value]]:
    """A dimension of the tile from `start` on, which `variable` runs along. Gives which of its points exist, {} where all do."""
    name = variable.name
    printer.lines.add(f"{name} = {start} + {tile.arange(dim)}")
    printer.variable(variable, Value.along(name, dim))
    if isinstance(variable.extent, int) and variable.extent % block == 0:
        yield {}
        return
    printer.lines.add(f"{name}_in = {name} < {printer.size(variable.extent)}")
    yield {dim: Value.along(f"{name}_in", dim)}
