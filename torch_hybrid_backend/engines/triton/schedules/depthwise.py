"""Convolutions with few channels in and out of a group, as depthwise ones: a program has a tile of points by channels and adds up the taps of
the window, which are unrolled. Memory bounds them; there is no k that a matrix product could run along.

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
from torch_hybrid_backend.engines.triton.schedules.windows import window
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
    """Whether a kernel is computed so."""
    terms = known_int(product([v.extent for v in kernel.w_vars[1:]]))
    most = max(known_int(kernel.domain[1].extent) // kernel.groups, known_int(kernel.w_vars[1].extent))
    return most <= _FEW and terms <= _MOST_TERMS


def launch(kernel: ConvKernel, target: Target) -> Launch:
    n, o, *out = kernel.domain
    return tiled_launch(_tiling(kernel, target), product([v.extent for v in (n, *out)]), o.extent, 1)


def _tiling(kernel: ConvKernel, target: Target) -> Tiling:
    n, o, *out = kernel.domain
    points, channels = size_hint(product([v.extent for v in (n, *out)])), known_int(o.extent)
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
    n, o, *out = kernel.domain
    tiling = _tiling(kernel, target)
    out_channels, in_channels = known_int(o.extent) // kernel.groups, known_int(kernel.w_vars[1].extent)
    points, point_env = flattened([n, *out], "m")
    channel, c = LoopVar("o", o.extent), LoopVar("c", in_channels)
    taps = [LoopVar(f"tap{d}", v.extent) for d, v in enumerate(kernel.w_vars[2:])]
    tile, dtype = Tile(("ROWS", "COLUMNS")), kernel.accumulator.dtype
    products = Product(printer, dtype, dtype, tf32=False)
    with result_tile(printer, tile, points, channel, (), tiling) as (_, rows, columns):
        inside = {**rows, **columns}
        printer.lines.add(f"acc = tl.zeros([ROWS, COLUMNS], {DTYPES[dtype][0]})")
        with _terms(printer, [c, *taps]) as env:
            place, tests = window(kernel, point_env, env, taps)
            source = index_of(channel) // out_channels * in_channels + env[c]
            own = {
                **dict(zip(kernel.x_vars, (point_env[n], source, *place), strict=True)),
                **dict(zip(kernel.w_vars, (index_of(channel), env[c], *(env[t] for t in taps)), strict=True)),
            }
            with printer.over(tile, own, inside):
                x = products.term(kernel.x, *map(printer.expr, tests))
                printer.lines.add(f"acc = acc + {x.text} * {products.term(kernel.w).text}")
        printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        with printer.over(tile, {**point_env, o: index_of(channel)}, inside):
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
