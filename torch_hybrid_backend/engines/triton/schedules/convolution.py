"""Convolution as a matrix product whose left operand is read where it lies (implicit GEMM): no copy of the image's windows is made.

Rows of the result are points of all images, columns output channels of a group, k the channels of a group by the taps of the window.

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, section 3.
"""

from __future__ import annotations

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.matmul import Product, operand_dtype, tiled
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, blocks, flattened, program_start
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.kernels import ConvKernel
from torch_hybrid_backend.loops.ops import index_in
from torch_hybrid_backend.sizes.size import Dim, product


def launch(kernel: ConvKernel, target: Target) -> Launch:
    points = product([kernel.domain[0].extent, *(v.extent for v in kernel.domain[2:])])
    out_channels = _whole(kernel.domain[1].extent) // kernel.groups
    depth = product([v.extent for v in kernel.w_vars[1:]])
    return tiled(points, out_channels, depth, kernel.groups, operand_dtype(target, kernel.x, kernel.w), target)


def emit(kernel: ConvKernel, printer: Printer, target: Target, launch: Launch) -> None:
    n, o, *out = kernel.domain
    out_channels, in_channels = _whole(o.extent) // kernel.groups, _whole(kernel.w_vars[1].extent)
    points, point_env = flattened([n, *out], "m")
    channel = LoopVar("o", out_channels)
    taps = [LoopVar(f"tap{d}", v.extent) for d, v in enumerate(kernel.w_vars[2:])]
    depth_variables = [LoopVar("c", in_channels), *taps]
    k_extent = product([v.extent for v in depth_variables])
    dtype = operand_dtype(target, kernel.x, kernel.w)
    rows, columns, depth = (launch.constants[name] for name in ("ROWS", "COLUMNS", "DEPTH"))
    lines = printer.lines
    lines.add(f"down = {printer.size(blocks(points.extent, rows))}")
    lines.add(f"across = {printer.size(blocks(out_channels, columns))}")
    lines.add(f"program = {program_start(printer)}")
    lines.add("group = program // (down * across)")
    group = LoopVar("group", kernel.groups)
    printer.variable(group, Value("group"))
    tile = Tile(("ROWS", "COLUMNS"))
    whole_channel = index_of(group) * out_channels + index_of(channel)
    with (
        axis(printer, tile, 0, points, "(program // across % down) * ROWS", rows) as in_rows,
        axis(printer, tile, 1, channel, "(program % across) * COLUMNS", columns) as in_columns,
    ):
        accumulator = kernel.accumulator.dtype
        products = Product(printer, dtype, accumulator, tf32=target.convolution_tf32)
        lines.add(f"acc = tl.zeros([ROWS, COLUMNS], {DTYPES[accumulator][0]})")
        left, right = Tile(("ROWS", "DEPTH")), Tile(("DEPTH", "COLUMNS"))
        with lines.block(f"for k in range(0, {printer.size(k_extent)}, DEPTH):"):
            ka, env = flattened(depth_variables, "ka")
            with axis(printer, left, 1, ka, "k", depth) as inside:
                place, conditions = _window(kernel, point_env, env, out, taps)
                c = env[depth_variables[0]] + index_of(group) * in_channels
                own = dict(zip(kernel.x_vars, (point_env[n], c, *place), strict=True))
                with printer.over(left, own, {**in_rows, **inside}):
                    tests = [printer.expr(index_in(index, 0, v.extent)) for index, v in conditions]
                    with printer.guarded(tests):
                        a = products.operand(kernel.x, _both([*inside.values(), *tests]))
            kb, env = flattened(depth_variables, "kb")
            with axis(printer, right, 0, kb, "k", depth) as inside:
                own = dict(zip(kernel.w_vars, (whole_channel, *(env[v] for v in depth_variables)), strict=True))
                with printer.over(right, own, {**in_columns, **inside}):
                    b = products.operand(kernel.w, inside.get(0))
            products.add("acc", a, b)
        printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        with printer.over(tile, {**point_env, o: whole_channel}, {**in_rows, **in_columns}):
            for store in kernel.stores:
                printer.store(store)


def _window(
    kernel: ConvKernel,
    point_env: dict[LoopVar, Index],
    env: dict[LoopVar, Index],
    out: list[LoopVar],
    taps: list[LoopVar],
) -> tuple[list[Index], list[tuple[Index, LoopVar]]]:
    """Where in the image a tap of the window lies, and what must be inside it."""
    place = [
        point_env[v] * stride - padding + env[tap] * dilation
        for v, tap, stride, padding, dilation in zip(
            out, taps, kernel.stride, kernel.padding, kernel.dilation, strict=True
        )
    ]
    return place, list(zip(place, kernel.x_vars[2:], strict=True))


def _both(values: list[Value]) -> Value | None:
    if not values:
        return None
    return Value(" & ".join(v.text for v in values), frozenset().union(*(v.dims for v in values)))


def _whole(size: Dim) -> int:
    assert isinstance(size, int), "channels are known when a convolution is compiled"
    return size
