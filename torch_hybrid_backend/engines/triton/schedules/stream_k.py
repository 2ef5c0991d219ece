"""Stream-K: where tiles fill the last round of programs badly, all multiprocessors share the steps along k of the tiles in it.

    StreamMatMulKernel    a program for each whole tile, and more of them for equal parts of the others' steps, which store their sums
    FixUpKernel           adds the sums of each shared tile, and has the epilogue there

No program waits for another one, and sums are added in one order: equal inputs give equal bits. What is shared is written to memory and read
again, a few tiles for each multiprocessor.

Source: Osama, Merrill, Cecka, Garland and Owens, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the
GPU", PPoPP 2023: its hybrid of whole tiles and one shared round, with the fix-up as a kernel in place of flags that programs wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.matmul import MatMulTiles, result_tile
from torch_hybrid_backend.engines.triton.schedules.tiles import power_of_2, program_start
from torch_hybrid_backend.engines.triton.schedules.tilings import (
    FixUpKernel,
    Shares,
    StreamMatMulKernel,
    Tiling,
    shares_of,
    tiles_of,
)
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.sizes.size import known_int

_ELEMENTS = 2048  # of a shared tile that a program of the second kernel finishes: 16 a thread, in 4 loads of 16 bytes


def launch(kernel: StreamMatMulKernel | FixUpKernel, target: Target) -> Launch:
    shares, tiling = _shares(kernel), kernel.tiling
    shared = {"WHOLE": shares.whole, "STEPS": shares.steps, "EACH": shares.each}
    if isinstance(kernel, StreamMatMulKernel):
        programs = shares.whole + shares.programs
        return Launch((programs, 1, 1), {**tiling.constants, **shared}, tiling.warps, tiling.stages)
    height = min(tiling.rows, power_of_2(max(1, _ELEMENTS // tiling.columns)))
    constants = {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "HEIGHT": height, **shared}
    return Launch((shares.shared * tiling.rows // height, 1, 1), constants)


def emit(kernel: StreamMatMulKernel | FixUpKernel, printer: Printer, target: Target, launch: Launch) -> None:
    if isinstance(kernel, StreamMatMulKernel):
        _emit_stream(kernel, printer, target)
    else:
        _emit_fix_up(kernel, printer)


def shares_in(domain: Sequence[LoopVar], k: LoopVar, tiling: Tiling) -> Shares:
    """The shares that programs have of the last tiles of a product of known size: `domain` is (b, m, n)."""
    batch, m, n, depth = (known_int(variable.extent) for variable in (*domain, k))
    return shares_of(tiling, tiles_of(tiling, batch, m, n), -(-depth // tiling.depth))


def _shares(kernel: StreamMatMulKernel | FixUpKernel) -> Shares:
    return shares_in(kernel.domain, kernel.k, kernel.tiling)


def _emit_stream(kernel: StreamMatMulKernel, printer: Printer, target: Target) -> None:
    lines, shares = printer.lines, _shares(kernel)
    tiles = MatMulTiles(kernel, printer, target, kernel.tiling)
    lines.add(f"program = {program_start(printer)}")
    # The steps of all tiles are numbered one behind the other; a program has those from `at` to `stop`.
    lines.add("at = program * STEPS")
    lines.add("stop = at + STEPS")
    with lines.block("if program >= WHOLE:"):
        lines.add("at = WHOLE * STEPS + (program - WHOLE) * EACH")
        lines.add(f"stop = min(at + EACH, {shares.tiles} * STEPS)")
    with lines.block("while at < stop:"):
        lines.add("begin = at % STEPS")
        lines.add("end = min(begin + stop - at, STEPS)")
        lines.add("number = at // STEPS")
        with tiles.at("number") as place:
            with lines.block("for step in range(begin, end):"):
                tiles.add_products(place)
            if shares.whole:
                with lines.block("if program < WHOLE:"):
                    tiles.store(kernel.stores, place)
            with lines.block("if program >= WHOLE:"):
                _store_sum(kernel, printer, shares)
        lines.add("at += end - begin")


def _store_sum(kernel: StreamMatMulKernel, printer: Printer, shares: Shares) -> None:
    tile = Tile(("ROWS", "COLUMNS"))
    point = _point(kernel, shares)
    printer.variable(point[0], printer.let("program - WHOLE + number - WHOLE", stem="sum"))
    for dim, variable in enumerate(point[1:]):
        printer.variable(variable, printer.let(tile.arange(dim), frozenset({dim}), stem=variable.name))
    with printer.over(tile, {}, {}):
        place = tuple(map(index_of, point))
        printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        printer.store(Store(kernel.partial, place, kernel.accumulator.at(place)))


def _emit_fix_up(kernel: FixUpKernel, printer: Printer) -> None:
    lines, shares, tiling = printer.lines, _shares(kernel), kernel.tiling
    batch, m, n = kernel.domain
    i, j = LoopVar("m", m.extent), LoopVar("n", n.extent)
    tile = Tile(("HEIGHT", "COLUMNS"))
    lines.add(f"program = {program_start(printer)}")
    lines.add("shared = program // (ROWS // HEIGHT)")
    lines.add("piece = program % (ROWS // HEIGHT)")
    with result_tile(printer, tile, i, j, (batch,), tiling, "WHOLE + shared", " + piece * HEIGHT") as (
        outer,
        rows,
        columns,
    ):
        which, down, across = _point(kernel, shares)
        printer.variable(which, Value("sum"))
        printer.variable(down, printer.let(f"piece * HEIGHT + {tile.arange(0)}", frozenset({0}), stem="row"))
        printer.variable(across, printer.let(tile.arange(1), frozenset({1}), stem="column"))
        lines.add(f"acc = tl.zeros([HEIGHT, COLUMNS], {DTYPES[kernel.accumulator.dtype][0]})")
        lines.add("begin = shared * STEPS // EACH")
        lines.add("end = (shared * STEPS + STEPS - 1) // EACH + 1")
        with lines.block("for share in tl.range(begin, end, num_stages=3):"), printer.over(tile, {}, {}):
            lines.add("sum = share + shared")
            own = printer.expr(kernel.partial.at(tuple(map(index_of, (which, down, across)))))
            lines.add(f"acc = acc + {own.text}")
        printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        with printer.over(tile, {**outer, m: index_of(i), n: index_of(j)}, {**rows, **columns}):
            for store in kernel.stores:
                printer.store(store)


def _point(kernel: StreamMatMulKernel | FixUpKernel, shares: Shares) -> tuple[LoopVar, LoopVar, LoopVar]:
    """Variables over the memory of sums."""
    tiling = kernel.tiling
    return LoopVar("sum", shares.sums), LoopVar("row", tiling.rows), LoopVar("column", tiling.columns)
