"""Convolution as a matrix product whose left operand is read where it lies (implicit GEMM): no copy of the image's windows is made.

Rows of the result are points of all images, columns output channels of a group, k the channels of a group by the taps of the window. Where
there are enough channels, a step along k stays within one tap: then a whole tile is the image shifted, and what is read is as contiguous as the
image is. With few channels in and out of a group nothing is worth a matrix product (`depthwise`). Of a transposed convolution the rows of a
program are points of one phase (`windows`). One to three spatial dimensions.

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from torch_hybrid_backend.engines.triton.schedules.windows import Windows, in_channels, out_channels, taps_of
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.kernels import ConvKernel
from torch_hybrid_backend.sizes.size import Size, product, size_hint

_GATHERED = (
    32  # elements along k of a step that are read one by one: more of them have more addresses than there are registers
)


def launch(kernel: ConvKernel, target: Target) -> Launch:
    if depthwise.serves(kernel):
        return depthwise.launch(kernel, target)
    windows = Windows(kernel)
    batch = kernel.groups * windows.phase_count
    return tiled_launch(tiling_of(kernel, target), windows.rows, out_channels(kernel), batch)


def emit(kernel: ConvKernel, printer: Printer, target: Target, launch: Launch) -> None:
    if depthwise.serves(kernel):
        depthwise.emit(kernel, printer, target, launch)
    else:
        _Convolution(kernel, printer, target).emit()


def tiling_of(kernel: ConvKernel, target: Target) -> Tiling:
    """The kernel's own tiling, or the best one by estimate."""
    return kernel.tiling if isinstance(kernel, TiledConvKernel) else best(work_of(kernel, target), target)


def work_of(kernel: ConvKernel, target: Target) -> Work:
    """The product that the convolution is, as work to be tiled."""
    windows, channels = Windows(kernel), in_channels(kernel)
    depth = channels * max(1, taps_of(kernel) // windows.phase_count)
    return Work(
        kernel.groups * windows.phase_count,
        size_hint(windows.rows),
        out_channels(kernel),
        depth,
        operand_dtype(target, kernel.x, kernel.w),
        bytes_of(kernel),
        channels if _is_by_tap(kernel) else depth,
        target.convolution_tf32,
        deepest=depth if _is_by_tap(kernel) else _GATHERED,
        # Phases have different numbers of steps along k.
        can_split=not isinstance(windows.rows, Size) and not kernel.transposed,
        can_be_thin=False,
        has_long_epilogue=has_long_epilogue(kernel),
    )


def _is_by_tap(kernel: ConvKernel) -> bool:
    """True if a step along k stays within one tap of the window."""
    return in_channels(kernel) >= MIN_TILE


@dataclass(frozen=True, slots=True)
class _Place:
    """A program's tile of the result: a part along k, a group, and which rows and columns exist."""

    part: Index
    group: Index
    rows: Mapping[int, Value]
    columns: Mapping[int, Value]


class _Convolution:
    """Writes one kernel's program."""

    def __init__(self, kernel: ConvKernel, printer: Printer, target: Target) -> None:
        self._kernel = kernel
        self._printer = printer
        self._tiling = tiling_of(kernel, target)
        work = work_of(kernel, target)
        self._products = Product(printer, work.dtype, kernel.accumulator.dtype, tf32=work.tf32)
        self._windows = Windows(kernel, counted=_is_by_tap(kernel))
        self._points, self._point_env = flattened(self._windows.points, "m")
        self._channel = LoopVar("o", out_channels(kernel))
        self._group = LoopVar("group", kernel.groups)
        self._c = LoopVar("c", in_channels(kernel))

    def emit(self) -> None:
        kernel, printer, tiling, windows = self._kernel, self._printer, self._tiling, self._windows
        tile, part = Tile(("ROWS", "COLUMNS")), part_of(kernel)
        number, outer = windows.begin(printer), (part, self._group)
        with result_tile(printer, tile, self._points, self._channel, outer, tiling, number) as (env, rows, columns):
            printer.lines.add(f"acc = tl.zeros([ROWS, COLUMNS], {DTYPES[kernel.accumulator.dtype][0]})")
            place = _Place(env[part], env[self._group], rows, columns)
            (self._by_tap if _is_by_tap(kernel) else self._by_window)(place)
            printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
            point, tests = windows.result(self._point_env)
            channel = place.group * out_channels(kernel) + index_of(self._channel)
            with (
                printer.over(tile, {**env, **point, kernel.domain[1]: channel}, {**rows, **columns}),
                printer.guarded([printer.expr(test) for test in tests]),
            ):
                for store in kernel.stores:
                    printer.store(store)

    def _by_tap(self, place: _Place) -> None:
        """Each step along k has channels of one tap."""
        printer, tiling = self._printer, self._tiling
        tap, env = flattened(self._windows.taps, "tap")
        each = blocks(in_channels(self._kernel), tiling.depth)
        with steps_along_k(printer, each * tap.extent * tiling.depth, place.part, tiling):
            start = "step * DEPTH"
            if tap.extent != 1:
                printer.lines.add(f"tap = step // {each}")
                printer.variable(tap, Value("tap"))
                start = f"step % {each} * DEPTH"
            self._step(place, [self._c], start, env)

    def _by_window(self, place: _Place) -> None:
        """k runs over channels and taps in the order in which they lie in memory."""
        kernel, printer, taps = self._kernel, self._printer, self._windows.taps
        is_last = runs_along(kernel.x, kernel.reads, kernel.x_vars[1])
        variables = [*taps, self._c] if is_last else [self._c, *taps]
        extent = product([v.extent for v in variables])
        with steps_along_k(printer, extent, place.part, self._tiling):
            self._step(place, variables, "step * DEPTH", {})

    def _step(self, place: _Place, variables: Sequence[LoopVar], start: str, taps: Mapping[LoopVar, Index]) -> None:
        """Adds the products of one step, in which k runs over `variables` from `start` on. `taps`: what the others are."""
        kernel, printer, depth, windows = self._kernel, self._printer, self._tiling.depth, self._windows
        left, right = Tile(("ROWS", "DEPTH")), Tile(("DEPTH", "COLUMNS"))
        ka, env = flattened(variables, "ka")
        with axis(printer, left, 1, ka, start, depth) as inside:
            pixel, tests = windows.image(self._point_env, {**taps, **env})
            c = env[self._c] + place.group * in_channels(kernel)
            own = dict(zip(kernel.x_vars, (self._point_env[kernel.domain[0]], c, *pixel), strict=True))
            with printer.over(left, own, {**place.rows, **inside}):
                a = self._products.operand(kernel.x, *inside.values(), *map(printer.expr, tests))
        kb, env = flattened(variables, "kb")
        with axis(printer, right, 0, kb, start, depth) as inside:
            own, tests = windows.weight(place.group, index_of(self._channel), env[self._c], {**taps, **env})
            with printer.over(right, own, {**place.columns, **inside}):
                b = self._products.operand(kernel.w, *inside.values(), *map(printer.expr, tests))
        self._products.add("acc", a, b)
