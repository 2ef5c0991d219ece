"""Rows: reductions over the same axes of one domain, with what is computed before, between and behind them.

A program has a tile of rows by elements of a row, laid out so that neighbouring threads read neighbouring memory: along a row, or, where rows
are columns of memory, across them in whole cache lines. A row that fits is held in registers (persistent): n elements of memory are read once,
whatever is computed of them. A longer one is read in chunks (looped), once for each pass (`one_pass`):

    sum, max, argmax, variance, log-sum-exp        1 reading       (variance and log-sum-exp were 2)
    softmax, layer norm                            2 readings, 1 writing       (were 3 and 1)
    a running sum (`scan`)                         1 reading, 1 writing

Where there are fewer rows than multiprocessors, a kernel is made into several first (`engines/triton/split.py`); one of them is a
`PartKernel`, whose programs have a part of each row.

Rows whose length is no multiple of 16 bytes (50257 elements) begin anywhere, and each thread reads one element of them at once, not 16 bytes.
A program could begin at the aligned address before its row; but Triton reads 16 bytes at once only where all of their elements have the same
mask, so that what is before the row, and behind it, would have to be read, too, and left out afterwards. Behind the last row of a tensor there
may be no memory. Results cannot be written so at all. Memory sees the same either way: a warp reads its lines whole, in more instructions.

Source: the persistent and looped reductions of TorchInductor (Ansel et al., "PyTorch 2", ASPLOS 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.accumulators import Accumulator, Exponentials, Rows, Squares
from torch_hybrid_backend.engines.triton.schedules.one_pass import Passes, passes_of
from torch_hybrid_backend.engines.triton.schedules.scan import Scan
from torch_hybrid_backend.engines.triton.schedules.tiles import (
    axis,
    block_for,
    blocks,
    flattened,
    power_of_2,
    program_start,
)
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.loops.ir import Expr, buffers_of_expr, loads_of
from torch_hybrid_backend.loops.kernels import RowKernel, Stage
from torch_hybrid_backend.loops.layout import offset_of
from torch_hybrid_backend.sizes.size import Dim, divide, product, size_hint

_MAX_PERSISTENT = 8192  # elements of a row that are held in registers
_CHUNK = 2048
_INTERPRETED = 1 << 20  # the same for the interpreter, where registers cost nothing
_ELEMENTS_PER_WARP = 256
# Of rows that are columns of memory.
_CACHE_LINE = 1024  # bits
_MAX_LINE = 64  # elements: wider tiles of bytes need registers that are not there
_COLUMN_TILE = 4096
_MAX_COLUMN_TILE = 16384  # where one that is held in registers saves a reading of memory
_COLUMN_ELEMENTS_PER_WARP = 512


@dataclass(frozen=True, slots=True, eq=False)
class PartKernel(RowKernel):
    """The reductions of parts of each row. A stage sees a part: elements `part * length` to `(part + 1) * length` of the row, as far as there
    are any; a sum of exponentials is relative to the part's own maximum. What is stored once per row has `part` as its last index."""

    part: LoopVar
    length: Dim


@dataclass(frozen=True, slots=True)
class _Order:
    """The kernel's axes as they lie in memory, fastest last. `line`: how many neighbouring elements are read at once."""

    rows: tuple[LoopVar, ...]
    elements: tuple[LoopVar, ...]
    are_columns: bool
    line: int


def launch(kernel: RowKernel, target: Target) -> Launch:
    height, width, per_warp = _tile(kernel, target)
    if any(stage.kind == "scan" and stage.combiner.startswith("arg") for stage in kernel.stages):
        per_warp //= 2  # elements and positions, combined in registers
    warps = min(16, power_of_2(-(-height * width // per_warp)))
    rows = blocks(product([v.extent for v in _order(kernel).rows]), height)
    parts = kernel.part.extent if isinstance(kernel, PartKernel) else 1
    return Launch((rows, parts, 1), {"ROWS": height, "COLUMNS": width}, warps)


def looped_tile(kernel: RowKernel, target: Target) -> tuple[int, int]:
    """Rows, and elements of a row, that a program has at once where rows are read in chunks."""
    order = _order(kernel)
    rows = product([v.extent for v in order.rows])
    if order.are_columns and not target.has_large_tiles:
        lines = 2 if size_hint(rows) >= 2 * order.line * target.programs else 1
        height = block_for(rows, lines * order.line)
        return height, _COLUMN_TILE // height
    width = _INTERPRETED if target.has_large_tiles else _CHUNK
    return _height(rows, width, target), width


def _height(rows: Dim, width: int, target: Target) -> int:
    return block_for(rows, min(target.elements // width, -(-size_hint(rows) // target.programs)))


def _tile(kernel: RowKernel, target: Target) -> tuple[int, int, int]:
    """Rows, elements of a row, and elements for each warp."""
    order = _order(kernel)
    rows = product([v.extent for v in order.rows])
    elements = product([v.extent for v in order.elements])
    height, width = looped_tile(kernel, target)
    is_whole = isinstance(elements, int) and not isinstance(kernel, PartKernel)
    whole = power_of_2(max(1, elements)) if isinstance(elements, int) else 0
    if order.are_columns and not target.has_large_tiles:
        most = _COLUMN_TILE if passes_of(kernel).count == 1 else _MAX_COLUMN_TILE
        return height, whole if is_whole and whole * height <= most else width, _COLUMN_ELEMENTS_PER_WARP
    most = _INTERPRETED if target.has_large_tiles else _MAX_PERSISTENT
    if is_whole and whole <= most:
        height, width = _height(rows, whole, target), whole
    return height, width, _ELEMENTS_PER_WARP


def _order(kernel: RowKernel) -> _Order:
    """Told by the load that moves most memory; the kernel's own order where its address is not a sum of strides. Elements keep it where
    positions count: of equal ones the first is found."""
    rows = tuple(v for d, v in enumerate(kernel.domain) if d not in kernel.axes)
    elements = tuple(kernel.domain[d] for d in kernel.axes)
    layouts = {argument.buffer: argument.layout for argument in kernel.reads}
    loads = [load for stage in kernel.stages for load in loads_of(stage.value) if load.buffer in layouts]
    if not loads:
        return _Order(rows, elements, False, 1)
    largest = max(loads, key=lambda load: size_hint(product(load.buffer.shape)))
    steps = dict(offset_of(layouts[largest.buffer], largest.buffer.shape, largest.index).terms)
    varying = [v for v in kernel.domain if v.extent != 1]
    line = min(_MAX_LINE, _CACHE_LINE // _bits(largest.buffer.dtype))
    if not varying or not all(v in steps for v in varying):
        return _Order(rows, elements, False, line)

    def step(variable: LoopVar) -> int:
        return size_hint(steps.get(variable, 0))

    fastest = min(varying, key=step)
    has_positions = any(stage.combiner.startswith("arg") for stage in kernel.stages)
    by_step = [tuple(sorted(part, key=step, reverse=True)) for part in (rows, elements)]
    return _Order(by_step[0], elements if has_positions else by_step[1], fastest in rows, line)


def _bits(dtype: str) -> int:
    return 8 if dtype == "bool" else int("".join(filter(str.isdigit, dtype)))


def emit(kernel: RowKernel, printer: Printer, target: Target, launch: Launch) -> None:
    order = _order(kernel)
    rows, row_env = flattened(order.rows, "i")
    elements, element_env = flattened(order.elements, "j")
    height, width = launch.constants["ROWS"], launch.constants["COLUMNS"]
    tile = Tile(("COLUMNS", "ROWS") if order.are_columns else ("ROWS", "COLUMNS"))
    row = int(order.are_columns)
    with axis(printer, tile, row, rows, f"{program_start(printer)} * ROWS", height) as row_bounds:
        emitter = _Emitter(kernel, printer, tile, row, {**row_env, **element_env}, elements, row_bounds)
        if isinstance(elements.extent, int) and elements.extent <= width and not isinstance(kernel, PartKernel):
            emitter.persistent(width)
        else:
            emitter.looped(width)


class _Emitter:
    """Writes one kernel's stages. `row`: the tile's dimension that rows run along; `bounds`: which rows exist."""

    def __init__(
        self,
        kernel: RowKernel,
        printer: Printer,
        tile: Tile,
        row: int,
        env: Mapping[LoopVar, Index],
        elements: LoopVar,
        bounds: Mapping[int, Value],
    ) -> None:
        self._kernel = kernel
        self._stages = kernel.stages
        self._printer = printer
        self._tile = tile
        self._element = 1 - row
        self._env = env
        self._elements = elements
        self._bounds = bounds
        self._rows = Rows(
            row,
            self._element,
            Value.along(elements.name, self._element),
            isinstance(elements.extent, int) and elements.extent >= 1 << 31,
        )

    def persistent(self, width: int) -> None:
        """All stages in their order, on whole rows."""
        printer = self._printer
        with self._elements_from("0", width) as inside:
            for stage in self._stages:
                if stage.kind == "reduce":
                    value = printer.full(printer.expr(stage.value))
                    self._keep(stage, Accumulator(stage, printer, self._rows).of(value, inside))
                elif stage.kind == "scan":
                    self._keep(stage, Scan(stage, printer, self._rows).of(printer.expr(stage.value)))
                else:
                    self._run(stage)

    def looped(self, width: int) -> None:
        """Passes over the rows: each has the stages that need the reductions of those before it. What is mapped or scanned is computed again in
        each pass that needs it."""
        printer = self._printer
        passes = passes_of(self._kernel)
        for stage in self._stages:
            if stage.kind == "map":
                assert stage.local is not None
                printer.locals[stage.local] = lambda _, stage=stage: printer.expr(stage.value)  # type: ignore[misc]
        begin, end = self._range()
        count = end if begin == "0" else f"{end} - {begin}"
        rows = replace(self._rows, chunk=f"(chunk - {begin}) // COLUMNS", count=count)
        for number in range(max(passes.of.values(), default=0) + 1):
            own = [stage for stage in self._stages if passes.of[stage] == number]
            with printer.over(self._tile, self._env, self._bounds):
                for stage in own:
                    if stage.kind in ("scalar", "store_scalar"):
                        self._run(stage)
            reductions = self._accumulators(own, passes, rows)
            stores = [stage for stage in own if stage.kind == "store"]
            if not reductions and not stores:
                continue
            elements = [reduction.element for reduction in reductions] + [stage.value for stage in stores]
            scans = [Scan(stage, printer, rows) for stage in self._scans(elements)]
            with printer.over(self._tile, self._env, self._bounds):
                for scan in scans:
                    scan.begin()
                for reduction in reductions:
                    reduction.begin()
            with (
                printer.lines.block(f"for chunk in range({begin}, {end}, COLUMNS):"),
                self._elements_from("chunk", width) as inside,
            ):
                for scan in scans:
                    self._keep(scan.stage, scan.add(printer.expr(scan.stage.value)))
                for reduction in sorted(reductions, key=lambda reduction: reduction.order):
                    reduction.add(printer.expr(reduction.element), inside)
                for stage in stores:
                    self._run(stage)
            with printer.over(self._tile, self._env, self._bounds):
                for reduction in reductions:
                    self._keep(reduction.stage, reduction.end())

    @contextmanager
    def _elements_from(self, start: str, width: int) -> Iterator[Value | None]:
        """Inside it expressions are over `width` elements of each row. Gives which of them exist, None where all do."""
        printer, kernel = self._printer, self._kernel
        with axis(printer, self._tile, self._element, self._elements, start, width) as in_row:
            inside = in_row
            if isinstance(kernel, PartKernel) and divide(kernel.length, width)[1] != 0:
                # Another kernel of the same parts decided their length.
                name = self._elements.name
                printer.lines.add(f"{name}_in = {name} < end")
                inside = {self._element: Value.along(f"{name}_in", self._element)}
            with printer.over(self._tile, self._env, {**self._bounds, **inside}):
                yield inside.get(self._element)

    def _range(self) -> tuple[str, str]:
        """The range of elements of a row that the program has."""
        printer, kernel = self._printer, self._kernel
        extent = printer.size(self._elements.extent)
        if not isinstance(kernel, PartKernel):
            return "0", extent
        printer.variable(kernel.part, Value("part"))
        wide = ".to(tl.int64)" if self._rows.is_wide else ""
        printer.lines.add(f"part = tl.program_id(1){wide}")
        printer.lines.add(f"begin = tl.minimum(part * ({printer.size(kernel.length)}), {extent})")
        printer.lines.add(f"end = tl.minimum(begin + ({printer.size(kernel.length)}), {extent})")
        return "begin", "end"

    def _accumulators(self, stages: Sequence[Stage], passes: Passes, rows: Rows) -> list[Accumulator]:
        """Accumulators, one for each reduction of a pass."""
        made: dict[Stage, Accumulator] = {}
        for stage in stages:
            joined = passes.joined.get(stage)
            if joined is not None and joined.kind == "squares":
                made[stage] = Squares(made[joined.base], stage, self._printer, rows)
            elif joined is not None:
                centre = None if isinstance(self._kernel, PartKernel) else joined.centre
                made[stage] = Exponentials(made[joined.base], centre, stage, self._printer, rows)
            elif stage.kind == "reduce":
                made[stage] = Accumulator(stage, self._printer, rows)
        return list(made.values())

    def _scans(self, exprs: Sequence[Expr]) -> list[Stage]:
        """The scans that expressions need, directly or through what is mapped or scanned, in their order."""
        by_local = {stage.local: stage for stage in self._stages if stage.kind in ("map", "scan")}
        needed: dict[Stage, None] = {}
        pending = list(exprs)
        while pending:
            for buffer in buffers_of_expr(pending.pop()):
                if (stage := by_local.get(buffer)) is not None and stage not in needed:
                    needed[stage] = None
                    pending.append(stage.value)
        return [stage for stage in self._stages if stage in needed and stage.kind == "scan"]

    def _run(self, stage: Stage) -> None:
        printer = self._printer
        if stage.store is not None:
            printer.store(stage.store)
        else:
            self._keep(stage, printer.expr(stage.value))

    def _keep(self, stage: Stage, value: Value) -> None:
        assert stage.local is not None
        self._printer.locals[stage.local] = lambda _: value
