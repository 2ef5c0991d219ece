"""Pointwise: one program for each block of points, flattened in the order in which the results lie in memory.

Where what is read lies in another order (a transposition), a program has a square of points instead: along the fastest axis of the results and
along that of what is read, so that both are read and written in whole cache lines.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, block_for, blocks, flattened, program_start
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, loads_of
from torch_hybrid_backend.loops.kernels import Argument, MapKernel
from torch_hybrid_backend.loops.layout import offset_of
from torch_hybrid_backend.sizes.size import product, size_hint

_SQUARE = 32
_MIN_EXTENT = 8  # of an axis that is worth a dimension of the tile


def emit(kernel: MapKernel, printer: Printer, target: Target) -> Launch:
    order = sorted(range(len(kernel.domain)), key=lambda d: _steps(kernel)[d], reverse=True)
    variables = [kernel.domain[d] for d in order]
    other = _read_along(kernel, variables)
    if other is not None:
        return _emit_square(kernel, printer, target, variables, other)
    flat, env = flattened(variables, "i")
    block = block_for(flat.extent, target.elements, 128)
    tile = Tile(("BLOCK",))
    with axis(printer, tile, 0, flat, f"{program_start(printer)} * BLOCK", block) as bounds, printer.over(tile, env, bounds):
        for store in kernel.stores:
            printer.store(store)
    return Launch((blocks(flat.extent, block), 1, 1), {"BLOCK": block}, warps=_warps(block))


def _warps(elements: int) -> int:
    return max(1, min(8, elements // 256))


def _steps(kernel: MapKernel) -> list[int]:
    """By how much the first result's address grows along each variable; those that come first run slowest."""
    store = kernel.stores[0]
    layout = next(w.layout for w in kernel.writes if w.buffer is store.buffer)
    offset = offset_of(layout, store.buffer.shape, store.index)
    found = []
    for position, variable in enumerate(kernel.domain):
        own = [c for atom, c in offset.terms if atom == variable]
        # Without one of its own, where the domain has it.
        found.append(size_hint(own[0]) if own else size_hint(product([v.extent for v in kernel.domain[position + 1 :]])))
    return found


def _read_along(kernel: MapKernel, variables: list[LoopVar]) -> LoopVar | None:
    """The axis along which neighbours are read, where it is not the one along which they are written."""
    layouts: dict[Buffer, Argument] = {a.buffer: a for a in kernel.reads}
    fastest = variables[-1] if variables else None
    for store in kernel.stores:
        for load in loads_of(store.value):
            if load.buffer not in layouts:
                continue
            offset = offset_of(layouts[load.buffer].layout, load.buffer.shape, load.index)
            unit = {atom for atom, c in offset.terms if c == 1 and isinstance(atom, LoopVar)}
            along = any(atom == fastest for atom in offset.leaves())
            if unit and along and fastest not in unit and fastest is not None:
                other = next(iter(unit & set(variables)), None)
                if other is not None and min(size_hint(other.extent), size_hint(fastest.extent)) >= _MIN_EXTENT:
                    return other
    return None


def _emit_square(
    kernel: MapKernel, printer: Printer, target: Target, variables: list[LoopVar], other: LoopVar
) -> Launch:
    fastest = variables[-1]
    rest, env = flattened([v for v in variables if v not in (fastest, other)], "k")
    edge = 256 if target.is_interpreted else _SQUARE
    rows, columns = block_for(other.extent, edge), block_for(fastest.extent, edge)
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
    programs = product([blocks(j.extent, columns), blocks(i.extent, rows), rest.extent])
    return Launch((programs, 1, 1), {"ROWS": rows, "COLUMNS": columns}, warps=4)
