"""Pointwise: one program for each block of points, flattened in the order in which the first result lies in memory.

Where what is read lies in another order (a transposition), a program has a square of points instead: along the fastest axis of the result and
along that of what is read, so that both are read and written in whole cache lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, block_for, blocks, flattened, program_start
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import FLOAT8, loads_of
from torch_hybrid_backend.loops.kernels import MapKernel, ScatterKernel
from torch_hybrid_backend.loops.layout import offset_of
from torch_hybrid_backend.sizes.size import product, size_hint

_SQUARE = 32
_LARGE_SQUARE = 256
_MIN_EXTENT = 8  # of an axis that is worth a dimension of the tile
_ELEMENTS = 8  # of a thread: 16 bytes at once of all that has two bytes or more
_WARP = 32 * _ELEMENTS
_NARROW = ("bool", "int8", "uint8", *FLOAT8)


def launch(kernel: MapKernel, target: Target) -> Launch:
    variables = _in_memory_order(kernel)
    other = _read_along(kernel, variables)
    if other is None:
        return flat_launch(kernel, variables, target)
    edge = _LARGE_SQUARE if target.has_large_tiles else _SQUARE
    rows, columns = block_for(other.extent, edge), block_for(variables[-1].extent, edge)
    rest = product([v.extent for v in variables if v not in (other, variables[-1])])
    programs = product([blocks(variables[-1].extent, columns), blocks(other.extent, rows), rest])
    return Launch((programs, 1, 1), {"ROWS": rows, "COLUMNS": columns}, warps=max(1, min(4, rows * columns // _WARP)))


def flat_launch(kernel: MapKernel | ScatterKernel, variables: Sequence[LoopVar], target: Target) -> Launch:
    """Launch one dimension of blocks over all points."""
    points = product([v.extent for v in variables])
    factor = 2 if all(a.buffer.dtype in _NARROW for a in (*kernel.reads, *kernel.writes)) else 1
    block = block_for(points, factor * target.elements, factor * _WARP)
    return Launch((blocks(points, block), 1, 1), {"BLOCK": block}, warps=min(8, block // (factor * _WARP)))


def emit(kernel: MapKernel, printer: Printer, target: Target, launch: Launch) -> None:
    variables = _in_memory_order(kernel)
    other = _read_along(kernel, variables)
    if other is not None:
        _emit_square(kernel, printer, launch, variables, other)
        return
    flat, env = flattened(variables, "i")
    tile = Tile(("BLOCK",))
    with (
        axis(printer, tile, 0, flat, f"{program_start(printer)} * BLOCK", launch.constants["BLOCK"]) as bounds,
        printer.over(tile, env, bounds),
    ):
        for store in kernel.stores:
            printer.store(store)


def _in_memory_order(kernel: MapKernel) -> list[LoopVar]:
    """The variables, the one first along which the first result's address grows most."""
    store = kernel.stores[0]
    layout = next(w.layout for w in kernel.writes if w.buffer is store.buffer)
    steps = dict(offset_of(layout, store.buffer.shape, store.index).terms)
    domain = kernel.domain
    if not all(v in steps for v in domain if v.extent != 1):
        return list(domain)  # written through a quotient or a remainder
    return sorted(domain, key=lambda v: (v.extent == 1, size_hint(steps.get(v, 0))), reverse=True)


def _read_along(kernel: MapKernel, variables: Sequence[LoopVar]) -> LoopVar | None:
    """The axis along which neighbours are read, where it is not the one along which they are written."""
    if len(variables) < 2 or size_hint(variables[-1].extent) < _MIN_EXTENT:
        return None
    layouts = {argument.buffer: argument.layout for argument in kernel.reads}
    for load in (load for store in kernel.stores for load in loads_of(store.value)):
        if load.buffer not in layouts or load.buffer.by_value:
            continue
        offset = offset_of(layouts[load.buffer], load.buffer.shape, load.index)
        steps = dict(offset.terms)
        fastest = [v for v in variables if steps.get(v) == 1 and size_hint(v.extent) >= _MIN_EXTENT]
        if fastest and variables[-1] in steps and variables[-1] not in fastest:
            return fastest[0]
    return None


def _emit_square(
    kernel: MapKernel, printer: Printer, launch: Launch, variables: Sequence[LoopVar], other: LoopVar
) -> None:
    fastest = variables[-1]
    rest, env = flattened([v for v in variables if v not in (fastest, other)], "k")
    rows, columns = launch.constants["ROWS"], launch.constants["COLUMNS"]
    tile = Tile(("ROWS", "COLUMNS"))
    i, j = LoopVar("i", other.extent), LoopVar("j", fastest.extent)
    lines = printer.lines
    lines.add(f"across = {printer.size(blocks(j.extent, columns))}")
    lines.add(f"down = {printer.size(blocks(i.extent, rows))}")
    lines.add(f"program = {program_start(printer)}")
    lines.add("k = program // (across * down)")
    printer.variable(rest, Value("k"))
    with (
        axis(printer, tile, 0, i, "(program // across % down) * ROWS", rows) as in_rows,
        axis(printer, tile, 1, j, "(program % across) * COLUMNS", columns) as in_columns,
        printer.over(tile, {**env, other: index_of(i), fastest: index_of(j)}, {**in_rows, **in_columns}),
    ):
        for store in kernel.stores:
            printer.store(store)
