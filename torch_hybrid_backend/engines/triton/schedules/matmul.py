"""Matrix products: a program computes a tile of the result, along k in steps, and what is fused behind it.

Operands are whatever expressions the kernel has: they are computed where they are read. Programs run over the tiles in groups of rows, so that
those at work at once share operands in the second-level cache.

Source: the grouped order of programs of Triton's matrix multiplication tutorial (Tillet et al., MAPL 2019).
"""

from __future__ import annotations

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, block_for, blocks, program_start
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.ir import Call, Const, Expr, Load
from torch_hybrid_backend.loops.kernels import MatMulKernel
from torch_hybrid_backend.loops.ops import ROUND_TARGETS
from torch_hybrid_backend.sizes.size import Dim, product

_GROUP = 8  # rows of tiles
_MIN_TILE = 16  # of `tl.dot`
_HALVES = ("float16", "bfloat16")


def launch(kernel: MatMulKernel, target: Target) -> Launch:
    batch, m, n = kernel.domain
    dtype = operand_dtype(target, kernel.a, kernel.b)
    return tiled(m.extent, n.extent, kernel.k.extent, batch.extent, dtype, target)


def emit(kernel: MatMulKernel, printer: Printer, target: Target, launch: Launch) -> None:
    batch, m, n = kernel.domain
    dtype = operand_dtype(target, kernel.a, kernel.b)
    rows, columns, depth = (launch.constants[name] for name in ("ROWS", "COLUMNS", "DEPTH"))
    lines = printer.lines
    lines.add(f"down = {printer.size(blocks(m.extent, rows))}")
    lines.add(f"across = {printer.size(blocks(n.extent, columns))}")
    lines.add(f"program = {program_start(printer)}")
    lines.add("batch = program // (down * across)")
    lines.add("program = program % (down * across)")
    lines.add(f"first = program // ({_GROUP} * across) * {_GROUP}")
    lines.add(f"group = min(down - first, {_GROUP})")
    i, j = LoopVar("m", m.extent), LoopVar("n", n.extent)
    z = LoopVar("batch", batch.extent)
    printer.variable(z, Value("batch"))
    tile = Tile(("ROWS", "COLUMNS"))
    outer: dict[LoopVar, Index] = {batch: index_of(z), m: index_of(i), n: index_of(j)}
    with (
        axis(printer, tile, 0, i, "(first + program % group) * ROWS", rows) as in_rows,
        axis(printer, tile, 1, j, f"program % ({_GROUP} * across) // group * COLUMNS", columns) as in_columns,
    ):
        accumulator = kernel.accumulator.dtype
        product_ = Product(printer, dtype, accumulator, tf32=target.tf32)
        lines.add(f"acc = tl.zeros([ROWS, COLUMNS], {DTYPES[accumulator][0]})")
        left, right = Tile(("ROWS", "DEPTH")), Tile(("DEPTH", "COLUMNS"))
        ka, kb = LoopVar("ka", kernel.k.extent), LoopVar("kb", kernel.k.extent)
        with lines.block(f"for k in range(0, {printer.size(kernel.k.extent)}, DEPTH):"):
            with (
                axis(printer, left, 1, ka, "k", depth) as inside,
                printer.over(left, {**outer, kernel.k: index_of(ka)}, {**in_rows, **inside}),
            ):
                a = product_.operand(kernel.a, inside.get(1))
            with (
                axis(printer, right, 0, kb, "k", depth) as inside,
                printer.over(right, {**outer, kernel.k: index_of(kb)}, {**in_columns, **inside}),
            ):
                b = product_.operand(kernel.b, inside.get(0))
            product_.add("acc", a, b)
        printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        with printer.over(tile, outer, {**in_rows, **in_columns}):
            for store in kernel.stores:
                printer.store(store)


def tiled(m: Dim, n: Dim, k: Dim, batch: Dim, dtype: str, target: Target) -> Launch:
    """Programs for tiles of a product of `batch` matrices, whose operands are held in `dtype`."""
    if target.has_large_tiles:
        most = 64 if dtype not in (*_HALVES, "float32") else 1024
        depth = 64 if most == 64 else 4096
    else:
        most, depth = (128, 64) if dtype in _HALVES else (64, 32) if dtype == "float32" else (32, 8)
    rows, columns = block_for(m, most, _MIN_TILE), block_for(n, most, _MIN_TILE)
    constants = {"ROWS": rows, "COLUMNS": columns, "DEPTH": block_for(k, depth, min(depth, _MIN_TILE))}
    programs = product([batch, blocks(m, rows), blocks(n, columns)])
    return Launch((programs, 1, 1), constants, warps=8 if rows * columns >= 128 * 128 else 4)


def operand_dtype(target: Target, *operands: Expr) -> str:
    """What both operands of a product can be held in without rounding: a half type where all that they are read from is of it.

    The interpreter multiplies no bfloat16.
    """
    for half in _HALVES[:1] if target.is_interpreted else _HALVES:
        if all(_is_held_in(half, operand) for operand in operands):
            return half
    return operands[0].dtype


def _is_held_in(dtype: str, e: Expr) -> bool:
    match e:
        case Load(buffer=buffer):
            return buffer.dtype == dtype
        case Const(value=value):
            return value == 0
        case Call(op="round", args=(_, Const(value=target))):
            return ROUND_TARGETS[int(target)] == dtype
        case Call(op="guard" | "where", args=(_, first, second)):
            return _is_held_in(dtype, first) and _is_held_in(dtype, second)
    return False


class Product:
    """Writes sums of products of tiles. `dtype`: what the operands are held in; `accumulator`: the sum's."""

    def __init__(self, printer: Printer, dtype: str, accumulator: str, *, tf32: bool) -> None:
        self._printer = printer
        self._dtype = dtype
        self._accumulator = accumulator
        self._by_dot = dtype in (*_HALVES, "float32")
        self._precision = "tf32" if tf32 and dtype == "float32" else "ieee"

    def operand(self, e: Expr, inside: Value | None) -> Value:
        """An expression as an operand: 0 where there is no element along k."""
        printer = self._printer
        if isinstance(e, Load) and e.buffer.dtype == self._dtype and e.buffer not in printer.locals:
            value = printer.raw_load(e)
            if inside is None or inside.dims <= value.dims:
                return printer.full(value)  # what is masked is 0
        else:
            value = printer.expr(e)
        text = value.text if inside is None else f"tl.where({inside.text}, {value.text}, 0)"
        dims = value.dims if inside is None else value.dims | inside.dims
        return printer.full(printer.let(f"{text}.to({DTYPES[self._dtype][0]})", dims))

    def add(self, name: str, a: Value, b: Value) -> None:
        """name += a @ b"""
        self._printer.lines.add(f"{name} = {self.of(a, b, name)}")

    def of(self, a: Value, b: Value, onto: str = "") -> str:
        """a @ b, with `onto` added."""
        if self._by_dot:
            plus = f", acc={onto}" if onto else ""
            return f'tl.dot({a.text}, {b.text}{plus}, input_precision="{self._precision}")'
        result = f"tl.sum({a.text}[:, :, None] * {b.text}[None, :, :], 1).to({DTYPES[self._accumulator][0]})"
        return f"{onto} + {result}" if onto else result
