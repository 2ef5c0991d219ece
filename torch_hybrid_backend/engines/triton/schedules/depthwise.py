"""Convolutions with few channels in and out of a group, as depthwise ones: a program has a tile of points by channels and adds up the taps of
the window, which are unrolled. Memory bounds them; there is no k that a matrix product could run along. Transposed ones too: a program has
points of one phase (`windows`), and masks the taps that this phase lacks.

The tile is long along whichever of the two lies in memory side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.matmul import Product, result_tile, runs_along, tiled_launch
from torch_hybrid_backend.engines.triton.schedules.tiles import block_for, flattened, power_of_2
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
from torch_hybrid_backend.engines.triton.schedules.windows import Windows, in_channels, out_channels, taps_of
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.kernels import ConvKernel
from torch_hybrid_backend.sizes.size import known_int, product, size_hint

_FEW = 4  # channels of a group, or of its result: with more of them a matrix product has something to share
_MOST_TERMS = 128  # taps by channels
_MOST_UNROLLED = 25  # of them: with more their loads, all made ahead, have no registers
_CHANNELS = 64  # of a program, where they lie side by side
_ELEMENTS = 4096  # of a program there: each thread reads the weights of its channels once for several points
_FEWEST_ELEMENTS = 256


def serves(kernel: ConvKernel) -> bool:
    """True if a kernel is computed so."""
    channels = in_channels(kernel)
    return max(channels, out_channels(kernel)) <= _FEW and channels * taps_of(kernel) <= _MOST_TERMS


def launch(kernel: ConvKernel, target: Target) -> Launch:
    windows = Windows(kernel)
    return tiled_launch(_tiling(kernel, target), windows.rows, kernel.domain[1].extent, windows.phase_count)


def _tiling(kernel: ConvKernel, target: Target) -> Tiling:
    points, channels = size_hint(Windows(kernel).rows), known_int(kernel.domain[1].extent)
    share = max(_FEWEST_ELEMENTS, power_of_2(points * channels // target.programs))
    if runs_along(kernel.x, kernel.reads, kernel.x_vars[1]):
        elements = min(max(_ELEMENTS, target.elements), share)
        columns = block_for(channels, elements if target.has_large_tiles else _CHANNELS)
        rows = block_for(points, elements // columns)
    else:
        elements = min(target.elements, share)
        rows = block_for(points, elements)
        columns = block_for(channels, elements // rows)
    return Tiling(rows, columns, 1)


def emit(kernel: ConvKernel, printer: Printer, target: Target, launch: Launch) -> None:
    tiling, windows = _tiling(kernel, target), Windows(kernel)
    n, o = kernel.domain[:2]
    points, point_env = flattened(windows.points, "m")
    channel, c = LoopVar("o", o.extent), LoopVar("c", in_channels(kernel))
    tile, dtype = Tile(("ROWS", "COLUMNS")), kernel.accumulator.dtype
    products = Product(printer, dtype, dtype, tf32=False)
    number = windows.begin(printer)
    with result_tile(printer, tile, points, channel, (), tiling, number) as (_, rows, columns):
        inside = {**rows, **columns}
        printer.lines.add(f"acc = tl.zeros([ROWS, COLUMNS], {DTYPES[dtype][0]})")
        with _terms(printer, [c, *windows.taps]) as env:
            place, tests = windows.image(point_env, env)
            group, own_o = index_of(channel) // out_channels(kernel), index_of(channel) % out_channels(kernel)
            w_env, w_tests = windows.weight(group, own_o, env[c], env)
            x_place = (point_env[n], group * in_channels(kernel) + env[c], *place)
            with printer.over(tile, {**dict(zip(kernel.x_vars, x_place, strict=True)), **w_env}, inside):
                x = products.term(kernel.x, *map(printer.expr, tests))
                w = products.term(kernel.w, *map(printer.expr, w_tests))
                printer.lines.add(f"acc = acc + {x.text} * {w.text}")
        printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        point, tests = windows.result(point_env)
        with (
            printer.over(tile, {**point, o: index_of(channel)}, inside),
            printer.guarded([printer.expr(test) for test in tests]),
        ):
            for store in kernel.stores:
                printer.store(store)


@contextmanager
def _terms(printer: Printer, variables: Sequence[LoopVar]) -> Iterator[dict[LoopVar, Index]]:
    """Loops over all values of the variables: those that run fastest unrolled, as many as may be."""
    count = len(variables)
    while count and known_int(product([v.extent for v in variables[count - 1 :]])) <= _MOST_UNROLLED:
        count -= 1
    outer, outer_env = flattened(variables[:count], "above")
    inner, inner_env = flattened(variables[count:], "tap")
    printer.variable(outer, Value("above"))
    printer.variable(inner, Value("tap"))
    with ExitStack() as loops:
        if outer.extent != 1:
            loops.enter_context(printer.lines.block(f"for above in range({outer.extent}):"))
        loops.enter_context(printer.lines.block(f"for tap in tl.static_range({inner.extent}):"))
        yield {**outer_env, **inner_env}
