"""Convolution as a matrix product whose left operand is read where it lies (implicit GEMM): no copy of the image's windows is made.

Rows of the result are points of all images, columns output channels of a group, k the channels of a group by the taps of the window. Where
there are enough channels, a step along k stays within one tap: then a whole tile is the image shifted, and what is read is as contiguous as the
image is. With few channels in and out of a group nothing is worth a matrix product (`depthwise`).

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules import depthwise
from torch_hybrid_backend.engines.triton.schedules.matmul import (
    Product,
    bytes_of,
    has_long_epilogue,
    operand_dtype,
    result_tile,
    runs_along,
    steps_along_k,
    tiled_launch,
)
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, blocks, flattened
from torch_hybrid_backend.engines.triton.schedules.tilings import (
    MIN_TILE,
    TiledConvKernel,
    Tiling,
    Work,
    best,
    part_of,
)
from torch_hybrid_backend.engines.triton.schedules.windows import window
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.kernels import ConvKernel
from torch_hybrid_backend.sizes.size import Size, known_int, product, size_hint

_GATHERED = (
    32  # elements along k of a step that are read one by one: more of them have more addresses than there are registers
)


def launch(kernel: ConvKernel, target: Target) -> Launch:
    if depthwise.serves(kernel):
        return depthwise.launch(kernel, target)
    n, o, *out = kernel.domain
    points = product([v.extent for v in (n, *out)])
    return tiled_launch(tiling_of(kernel, target), points, known_int(o.extent) // kernel.groups, kernel.groups)


def emit(kernel: ConvKernel, printer: Printer, target: Target, launch: Launch) -> None:
    if depthwise.serves(kernel):
        depthwise.emit(kernel, printer, target, launch)
    else:
        _Convolution(kernel, printer, target).emit()


def tiling_of(kernel: ConvKernel, target: Target) -> Tiling:
    """The kernel's own tiling, or the best one by estimate."""
    return kernel.tiling if isinstance(kernel, TiledConvKernel) else best(work_of(kernel, target), target)


def work_of(kernel: ConvKernel, target: Target) -> Work:
    """What is to be cut up."""
    n, o, *out = kernel.domain
    points = product([v.extent for v in (n, *out)])
    channels, taps = known_int(kernel.w_vars[1].extent), product([v.extent for v in kernel.w_vars[2:]])
    depth = channels * known_int(taps)
    return Work(
        kernel.groups,
        size_hint(points),
        known_int(o.extent) // kernel.groups,
        depth,
        operand_dtype(target, kernel.x, kernel.w),
        bytes_of(kernel),
        channels if _is_by_tap(kernel) else depth,
        target.convolution_tf32,
        deepest=depth if _is_by_tap(kernel) else _GATHERED,
        can_split=not isinstance(points, Size),
        can_be_thin=False,
        has_long_epilogue=has_long_epilogue(kernel),
    )


def _is_by_tap(kernel: ConvKernel) -> bool:
    """Whether a step along k stays within one tap of the window."""
    return known_int(kernel.w_vars[1].extent) >= MIN_TILE


class _Convolution:
    """Writes one kernel's program."""

    def __init__(self, kernel: ConvKernel, printer: Printer, target: Target) -> None:
        self._kernel = kernel
        self._printer = printer
        self._tiling = tiling_of(kernel, target)
        work = work_of(kernel, target)
        self._products = Product(printer, work.dtype, kernel.accumulator.dtype, tf32=work.tf32)
        n, self._o, *self._out = kernel.domain
        self._out_channels = known_int(self._o.extent) // kernel.groups
        self._in_channels = known_int(kernel.w_vars[1].extent)
        self._points, self._point_env = flattened([n, *self._out], "m")
        self._channel = LoopVar("o", self._out_channels)
        self._group = LoopVar("group", kernel.groups)
        self._c = LoopVar("c", self._in_channels)
        self._taps = [LoopVar(f"tap{d}", v.extent) for d, v in enumerate(kernel.w_vars[2:])]

    def emit(self) -> None:
        kernel, printer, tiling = self._kernel, self._printer, self._tiling
        tile, part = Tile(("ROWS", "COLUMNS")), part_of(kernel)
        outer_variables = (part, self._group)
        with result_tile(printer, tile, self._points, self._channel, outer_variables, tiling) as (outer, rows, columns):
            printer.lines.add(f"acc = tl.zeros([ROWS, COLUMNS], {DTYPES[kernel.accumulator.dtype][0]})")
            channel = outer[self._group] * self._out_channels + index_of(self._channel)
            if _is_by_tap(kernel):
                self._by_tap(outer, channel, rows, columns)
            else:
                self._by_window(outer, channel, rows, columns)
            printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
            env = {**outer, **self._point_env, self._o: channel}
            with printer.over(tile, env, {**rows, **columns}):
                for store in kernel.stores:
                    printer.store(store)

    def _by_tap(
        self,
        outer: Mapping[LoopVar, Index],
        channel: Index,
        rows: Mapping[int, Value],
        columns: Mapping[int, Value],
    ) -> None:
        """Each step along k has channels of one tap."""
        printer, tiling = self._printer, self._tiling
        tap, env = flattened(self._taps, "tap")
        each = blocks(self._in_channels, tiling.depth)
        with steps_along_k(printer, each * tap.extent * tiling.depth, outer[part_of(self._kernel)], tiling):
            start = "step * DEPTH"
            if tap.extent != 1:
                printer.lines.add(f"tap = step // {each}")
                printer.variable(tap, Value("tap"))
                start = f"step % {each} * DEPTH"
            self._step([self._c], start, env, outer, channel, rows, columns)

    def _by_window(
        self,
        outer: Mapping[LoopVar, Index],
        channel: Index,
        rows: Mapping[int, Value],
        columns: Mapping[int, Value],
    ) -> None:
        """k runs over channels and taps in the order in which they lie in memory."""
        kernel, printer = self._kernel, self._printer
        is_last = runs_along(kernel.x, kernel.reads, kernel.x_vars[1])
        variables = [*self._taps, self._c] if is_last else [self._c, *self._taps]
        extent = product([v.extent for v in variables])
        with steps_along_k(printer, extent, outer[part_of(kernel)], self._tiling):
            self._step(variables, "step * DEPTH", {}, outer, channel, rows, columns)

    def _step(
        self,
        variables: list[LoopVar],
        start: str,
        taps: Mapping[LoopVar, Index],
        outer: Mapping[LoopVar, Index],
        channel: Index,
        rows: Mapping[int, Value],
        columns: Mapping[int, Value],
    ) -> None:
        """Adds the products of one step, in which k runs over `variables` from `start` on. `taps`: what the others are."""
        kernel, printer, depth = self._kernel, self._printer, self._tiling.depth
        left, right = Tile(("ROWS", "DEPTH")), Tile(("DEPTH", "COLUMNS"))
        ka, env = flattened(variables, "ka")
        with axis(printer, left, 1, ka, start, depth) as inside:
            place, tests = window(kernel, self._point_env, {**taps, **env}, self._taps)
            c = env[self._c] + outer[self._group] * self._in_channels
            own = dict(zip(kernel.x_vars, (self._point_env[kernel.domain[0]], c, *place), strict=True))
            with printer.over(left, own, {**rows, **inside}):
                a = self._products.operand(kernel.x, *inside.values(), *map(printer.expr, tests))
        kb, env = flattened(variables, "kb")
        with axis(printer, right, 0, kb, start, depth) as inside:
            w = (channel, env[self._c], *({**taps, **env}[tap] for tap in self._taps))
            with printer.over(right, dict(zip(kernel.w_vars, w, strict=True)), {**columns, **inside}):
                b = self._products.operand(kernel.w, *inside.values())
        self._products.add("acc", a, b)
