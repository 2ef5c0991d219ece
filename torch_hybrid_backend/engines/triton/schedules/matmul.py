"""Matrix products: a program computes a tile of the result, along k in steps, and what is fused behind it.

Operands are whatever expressions the kernel has: they are computed where they are read. Programs run over the tiles in groups of rows, so that
those at work at once share operands in the second-level cache. Products of few rows or columns have a schedule of their own (`thin`).

Source: the grouped order of programs of Triton's matrix multiplication tutorial (Tillet et al., MAPL 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.boxes import Box, boxes_of, copies_both
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, blocks, flattened, program_start
from torch_hybrid_backend.engines.triton.schedules.tilings import (
    HALVES,
    TiledMatMulKernel,
    Tiling,
    Work,
    best,
    part_of,
    tiles_of,
    width_of,
)
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Call, Const, Expr, Load, count_calls, is_rounded, loads_of
from torch_hybrid_backend.loops.kernels import Argument, ConvKernel, Kernel, MatMulKernel, Store
from torch_hybrid_backend.loops.layout import offset_of
from torch_hybrid_backend.sizes.size import Dim, Size, ceil_div, known_int, product, size_hint

_GROUP = 8  # rows of tiles
_SHORT_EPILOGUE = 6  # operations


def launch(kernel: MatMulKernel, target: Target) -> Launch:
    batch, m, n = kernel.domain
    return tiled_launch(tiling_of(kernel, target), m.extent, n.extent, batch.extent)


def emit(kernel: MatMulKernel, printer: Printer, target: Target, launch: Launch) -> None:
    tiling = tiling_of(kernel, target)
    how = _emit_thin if tiling.is_thin else _emit_persistent if tiling.persistent else _emit_tiles
    how(kernel, printer, target, tiling)


def tiling_of(kernel: MatMulKernel, target: Target) -> Tiling:
    """The kernel's own tiling, or the best one by estimate."""
    return kernel.tiling if isinstance(kernel, TiledMatMulKernel) else best(work_of(kernel, target), target)


def work_of(kernel: MatMulKernel, target: Target) -> Work:
    """The product, as work to be tiled."""
    sizes = [variable.extent for variable in (*kernel.domain, kernel.k)]
    batch, m, n, k = map(size_hint, sizes)
    is_known = not any(isinstance(size, Size) for size in sizes[:3])
    is_all_known = is_known and not isinstance(kernel.k.extent, Size)
    return Work(
        batch,
        m,
        n,
        k,
        operand_dtype(target, kernel.a, kernel.b),
        bytes_of(kernel),
        k,
        target.tf32,
        runs_along(kernel.a, kernel.reads, kernel.k),
        runs_along(kernel.b, kernel.reads, kernel.k),
        can_split=is_known,
        can_be_thin=is_known,
        can_share=is_all_known,
        can_copy=is_all_known and copies_both(kernel),
        stored=max(width_of(write.buffer.dtype) for write in kernel.writes),
        has_long_epilogue=has_long_epilogue(kernel),
    )


def _emit_tiles(kernel: MatMulKernel, printer: Printer, target: Target, tiling: Tiling) -> None:
    tiles = MatMulTiles(kernel, printer, target, tiling)
    with tiles.at() as place:
        with steps_along_k(printer, kernel.k.extent, place.outer[part_of(kernel)], tiling):
            tiles.add_products(place)
        tiles.store(kernel.stores, place)


def _emit_persistent(kernel: MatMulKernel, printer: Printer, target: Target, tiling: Tiling) -> None:
    """Programs that take one tile after the other, with operands copied by TMA. Both loops become one (`flatten`), so that the first steps of
    a tile are being loaded while the tile before it is stored."""
    tiles = MatMulTiles(kernel, printer, target, tiling)
    tiles.copy_operands()
    numbers = f"tl.range(tl.program_id(0), {tiles.count}, {tiling.persistent}, flatten=True)"
    with printer.lines.block(f"for number in {numbers}:"), tiles.at("number") as place:
        with steps_along_k(printer, kernel.k.extent, as_index(0), tiling):
            tiles.add_products(place)
        tiles.store(kernel.stores, place)


def _emit_thin(kernel: MatMulKernel, printer: Printer, target: Target, tiling: Tiling) -> None:
    """A product of few rows or columns, which memory bounds: every thread adds up products of what it loads of the larger operand, 16 bytes at
    a time, and threads add their sums when k is done. Tensor cores would spend their time on rows that do not exist."""
    batch, m, n = kernel.domain
    part = part_of(kernel)
    i, j, k = LoopVar("m", m.extent), LoopVar("n", n.extent), LoopVar("k", kernel.k.extent)
    tile = Tile(("ROWS", "COLUMNS", "DEPTH"))
    dtype = kernel.accumulator.dtype
    products = Product(printer, dtype, dtype, tf32=False)
    with result_tile(printer, tile, i, j, (part, batch), tiling) as (outer, in_rows, in_columns):
        env = {**outer, m: index_of(i), n: index_of(j)}
        printer.lines.add(f"acc = tl.zeros([ROWS, COLUMNS, DEPTH], {DTYPES[dtype][0]})")
        with (
            steps_along_k(printer, kernel.k.extent, outer[part], tiling),
            axis(printer, tile, 2, k, "step * DEPTH", tiling.depth) as inside,
            printer.over(tile, {**env, kernel.k: index_of(k)}, {**in_rows, **in_columns, **inside}),
        ):
            a, b = (products.term(e, inside.get(2)) for e in (kernel.a, kernel.b))
            printer.lines.add(f"acc = acc + {a.text} * {b.text}")
        printer.lines.add("total = tl.sum(acc, 2, keep_dims=True)")
        printer.locals[kernel.accumulator] = lambda _: Value.along("total", 0, 1)
        with printer.over(tile, env, {**in_rows, **in_columns}):
            for store in kernel.stores:
                printer.store(store)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tile. `outer`: what the variables are of which each value has all tiles of a result to itself; `rows`, `columns`: which of
    its points exist, by dimension."""

    outer: dict[LoopVar, Index]
    rows: dict[int, Value]
    columns: dict[int, Value]


class MatMulTiles:
    """Writes what a program of a matrix product does with a tile: `with at(...)`, the sums over k in `acc`, and what is stored of them."""

    def __init__(self, kernel: MatMulKernel, printer: Printer, target: Target, tiling: Tiling) -> None:
        self._kernel = kernel
        self._printer = printer
        self._tiling = tiling
        self._batch, self._m, self._n = kernel.domain
        self._i, self._j = LoopVar("m", self._m.extent), LoopVar("n", self._n.extent)
        dtype = operand_dtype(target, kernel.a, kernel.b)
        self._products = Product(printer, dtype, kernel.accumulator.dtype, tf32=target.tf32)
        self._boxes: list[tuple[str, Box]] = []

    @property
    def count(self) -> int:
        """Tiles of the whole, where its size is known."""
        return tiles_of(self._tiling, *(known_int(variable.extent) for variable in self._kernel.domain))

    @contextmanager
    def at(self, number: str = "") -> Iterator[Place]:
        """Write the block for the tile of that number; by default a program has the tile of its own number."""
        printer, tiling = self._printer, self._tiling
        outer = (part_of(self._kernel), self._batch)
        with result_tile(printer, Tile(("ROWS", "COLUMNS")), self._i, self._j, outer, tiling, number) as found:
            place = Place(*found)
            printer.lines.add(f"acc = tl.zeros([ROWS, COLUMNS], {DTYPES[self._kernel.accumulator.dtype][0]})")
            for name, box in self._boxes:
                printer.copied[box.load] = Value.along(box.copy(printer, name, place.outer), 0, 1)
            yield place

    def copy_operands(self) -> None:
        """From here on operands are copied by TMA, as far as it can."""
        kernel, printer = self._kernel, self._printer
        for stem, (e, row) in {"left": (kernel.a, self._m), "right": (kernel.b, self._n)}.items():
            for box in boxes_of(e, kernel.reads, self._batch, row, kernel.k, is_left=stem == "left"):
                name = printer.lines.name(stem)
                printer.lines.add(f"{name} = {box.descriptor(printer)}")
                printer.descriptors += 1
                self._boxes.append((name, box))

    def add_products(self, place: Place) -> None:
        """Adds the products of one step along k, that of number `step`."""
        kernel = self._kernel
        env = {**place.outer, self._m: index_of(self._i), self._n: index_of(self._j)}
        a = self._operand(kernel.a, Tile(("ROWS", "DEPTH")), 1, env, place.rows)
        b = self._operand(kernel.b, Tile(("DEPTH", "COLUMNS")), 0, env, place.columns)
        self._products.add("acc", a, b)

    def _operand(
        self, e: Expr, tile: Tile, along_k: int, env: Mapping[LoopVar, Index], bounds: Mapping[int, Value]
    ) -> Value:
        kernel, printer = self._kernel, self._printer
        if e in printer.copied:  # with zeros where nothing is
            with printer.over(tile, env, {}):
                return self._products.operand(e)
        k = LoopVar("ka" if along_k == 1 else "kb", kernel.k.extent)
        with (
            axis(printer, tile, along_k, k, "step * DEPTH", self._tiling.depth) as inside,
            printer.over(tile, {**env, kernel.k: index_of(k)}, {**bounds, **inside}),
        ):
            return self._products.operand(e, inside.get(along_k))

    def store(self, stores: Sequence[Store], place: Place) -> None:
        """Stores that read the kernel's accumulator."""
        printer = self._printer
        printer.locals[self._kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        env = {**place.outer, self._m: index_of(self._i), self._n: index_of(self._j)}
        with printer.over(Tile(("ROWS", "COLUMNS")), env, {**place.rows, **place.columns}):
            for store in stores:
                printer.store(store)


# What matrix products and convolutions have in common.


def tiled_launch(tiling: Tiling, m: Dim, n: Dim, batch: Dim) -> Launch:
    """Programs for the tiles of `batch` products of m rows and n columns."""
    if tiling.persistent:
        return Launch((tiling.persistent, 1, 1), tiling.constants, tiling.warps, tiling.stages)
    programs = product([tiling.splits, batch, blocks(m, tiling.rows), blocks(n, tiling.columns)])
    return Launch((programs, 1, 1), tiling.constants, tiling.warps, tiling.stages)


@contextmanager
def result_tile(
    printer: Printer,
    tile: Tile,
    i: LoopVar,
    j: LoopVar,
    outer: Sequence[LoopVar],
    tiling: Tiling,
    number: str = "",
    within: str = "",
) -> Iterator[tuple[dict[LoopVar, Index], dict[int, Value], dict[int, Value]]]:
    """A tile of the result: `i` runs along its rows, `j` along its columns, which begin at `row` and `column`. Gives what the variables `outer`
    are, of which each value has all tiles of a result to itself, and which rows and which columns exist. `number`: the tile's; by default the
    program's. `within`: text that is added to its first row."""
    lines = printer.lines
    down, across = blocks(i.extent, tiling.rows), blocks(j.extent, tiling.columns)
    lines.add(f"tile = {number or program_start(printer)}")
    which, env = flattened(outer, "outer")
    if which.extent != 1:
        lines.add(f"outer = tile // ({printer.size(down * across)})")
        lines.add(f"tile = tile % ({printer.size(down * across)})")
        printer.variable(which, Value("outer"))
    row, column = "tile * ROWS", "tile * COLUMNS"
    if down == 1:
        row = "0"
    elif across == 1:
        column = "0"
    else:
        lines.add(f"down = {printer.size(down)}")
        lines.add(f"across = {printer.size(across)}")
        lines.add(f"first = tile // ({_GROUP} * across) * {_GROUP}")
        lines.add(f"group = min(down - first, {_GROUP})")
        row = "(first + tile % group) * ROWS"
        column = f"tile % ({_GROUP} * across) // group * COLUMNS"
    lines.add(f"row = {row}{within}")
    with axis(printer, tile, 0, i, "row", tiling.rows) as in_rows:
        lines.add(f"column = {column}")
        with axis(printer, tile, 1, j, "column", tiling.columns) as in_columns:
            yield env, in_rows, in_columns


@contextmanager
def steps_along_k(printer: Printer, extent: Dim, part: Index, tiling: Tiling) -> Iterator[None]:
    """The loop `for step in range(...)` over a program's part of the steps along k."""
    steps = blocks(extent, tiling.depth)
    begin, end = "0", printer.size(steps)
    if tiling.splits > 1:
        each = printer.size(ceil_div(steps, tiling.splits))
        begin = printer.let(f"({printer.index(part).text}) * ({each})", stem="begin").text
        end = f"min({begin} + {each}, {end})"
    # Without tensor cores loads are staged only where that is asked for.
    loop = f"tl.range({begin}, {end}, num_stages={tiling.stages})" if tiling.is_thin else f"range({begin}, {end})"
    with printer.lines.block(f"for step in {loop}:"):
        yield


def runs_along(e: Expr, arguments: Sequence[Argument], variable: LoopVar) -> bool:
    """True if neighbours along a variable are neighbours in memory, in some of what an expression reads."""
    layouts = {argument.buffer: argument.layout for argument in arguments}
    read = [(load, layouts[load.buffer]) for load in loads_of(e) if load.buffer in layouts and load.index]
    return any(dict(offset_of(layout, load.buffer.shape, load.index).terms).get(variable) == 1 for load, layout in read)


def has_long_epilogue(kernel: MatMulKernel | ConvKernel) -> bool:
    """True if more is fused behind a kernel than a bias, an activation and the like."""
    return sum(count_calls(store.value) for store in kernel.stores) > _SHORT_EPILOGUE


def bytes_of(kernel: Kernel) -> int:
    """The bytes that a kernel reads and writes at least, at typical sizes."""
    return sum(
        size_hint(argument.span) * width_of(argument.buffer.dtype) for argument in (*kernel.reads, *kernel.writes)
    )


def all_of(tests: Sequence[Value | None]) -> Value | None:
    """The text that is true where all tests hold; None if there are no tests."""
    held = [test for test in tests if test is not None]
    if not held:
        return None
    return Value(" & ".join(test.text for test in held), frozenset().union(*(test.dims for test in held)))


def operand_dtype(target: Target, *operands: Expr) -> str:
    """The dtype that holds both operands of a product without rounding: a half type where everything they are read from has it.

    The interpreter multiplies no bfloat16.
    """
    for half in HALVES[:1] if target.is_interpreted else HALVES:
        if all(is_rounded(operand, half) for operand in operands):
            return half
    return operands[0].dtype


class Product:
    """Writes sums of products of tiles. `dtype`: what the operands are held in; `accumulator`: the sum's."""

    def __init__(self, printer: Printer, dtype: str, accumulator: str, *, tf32: bool) -> None:
        self._printer = printer
        self._dtype = dtype
        self._accumulator = accumulator
        self._by_dot = dtype in (*HALVES, "float32", "float64")
        self._precision = "tf32" if tf32 and dtype == "float32" else "ieee"

    def operand(self, e: Expr, *tests: Value | None) -> Value:
        """An expression as an operand, with all extents of the tile: 0 where a test does not hold (there is no such element along k)."""
        return self._printer.full(self.term(e, *tests))

    def term(self, e: Expr, *tests: Value | None) -> Value:
        """The same along those dimensions only that it varies along."""
        printer = self._printer
        held = [test for test in tests if test is not None]
        match e:
            case Call(op="guard", args=(condition, within, Const(value=0))):
                return self.term(within, *held, printer.expr(condition))
            case Load(buffer=b) if self._dtype in (b.dtype, e.dtype) and b not in printer.locals and not b.by_value:
                with printer.guarded(held):  # what is masked is 0
                    return printer.raw_load(e) if b.dtype == self._dtype else printer.expr(e)
        with printer.guarded(held):
            value = printer.expr(e)
        where = all_of(held)
        if where is None and e.dtype == self._dtype:
            return value
        text = value.text if where is None else f"tl.where({where.text}, {value.text}, 0)"
        dims = value.dims if where is None else value.dims | where.dims
        return printer.let(f"{text}.to({DTYPES[self._dtype][0]})", dims)

    def add(self, name: str, a: Value, b: Value) -> None:
        """name += a @ b"""
        self._printer.lines.add(f"{name} = {self.of(a, b, name)}")

    def of(self, a: Value, b: Value, onto: str = "") -> str:
        """a @ b, with `onto` added."""
        if self._by_dot:
            plus = f", acc={onto}" if onto else ""
            if self._dtype == "float64":
                plus += ", out_dtype=tl.float64"
            return f'tl.dot({a.text}, {b.text}{plus}, input_precision="{self._precision}")'
        result = f"tl.sum({a.text}[:, :, None] * {b.text}[None, :, :], 1).to({DTYPES[self._accumulator][0]})"
        return f"{onto} + {result}" if onto else result
