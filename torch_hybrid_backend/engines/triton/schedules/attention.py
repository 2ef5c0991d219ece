"""Attention: a program has some rows of queries and goes over the keys and values once, with a running softmax.

Source: Dao, "FlashAttention-2", 2023; the running softmax: Milakov and Gimelshein, 2018.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value, literal
from torch_hybrid_backend.engines.triton.schedules.matmul import Product, operand_dtype
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, block_for, blocks, power_of_2, program_start
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.kernels import AttentionKernel
from torch_hybrid_backend.sizes.size import Size, product, size_hint

_MIN_TILE = 16
_TILE = 64
_LARGE_TILE = 512


def launch(kernel: AttentionKernel, target: Target) -> Launch:
    b, h, s, e = kernel.domain
    if isinstance(e.extent, Size) or isinstance(kernel.k_vars[3].extent, Size):
        raise ScheduleError(
            "attention needs head widths that are known when it is compiled"
        )  # a tile holds a whole one
    most = _LARGE_TILE if target.has_large_tiles else _TILE
    rows = block_for(s.extent, most, _MIN_TILE)
    constants = {
        "ROWS": rows,
        "KEYS": block_for(kernel.k_vars[2].extent, most, _MIN_TILE),
        "WIDTH": max(_MIN_TILE, power_of_2(size_hint(kernel.k_vars[3].extent))),
        "VALUES": max(_MIN_TILE, power_of_2(size_hint(e.extent))),
    }
    return Launch((product([b.extent, h.extent, blocks(s.extent, rows)]), 1, 1), constants, stages=2)


def emit(kernel: AttentionKernel, printer: Printer, target: Target, launch: Launch) -> None:
    _Attention(kernel, printer, target, launch.constants).emit()


class _Attention:
    """Writes one kernel's program."""

    def __init__(self, kernel: AttentionKernel, printer: Printer, target: Target, constants: Mapping[str, int]) -> None:
        self._kernel = kernel
        self._printer = printer
        self._constants = constants
        self._operand = operand_dtype(target, kernel.q, kernel.k, kernel.v)
        self._compute = kernel.accumulator.dtype
        self._type = DTYPES[self._compute][0]
        self._products = Product(printer, self._operand, self._compute, tf32=target.tf32)
        b, h, s, e = kernel.domain
        self._heads = LoopVar("head", product([b.extent, h.extent]))
        self._place = (index_of(self._heads) // h.extent, index_of(self._heads) % h.extent)
        t, d = kernel.k_vars[2:]
        self._i, self._e = LoopVar("i", s.extent), LoopVar("e", e.extent)
        self._dq, self._dk = LoopVar("dq", d.extent), LoopVar("dk", d.extent)
        self._tk, self._tv = LoopVar("tk", t.extent), LoopVar("tv", t.extent)

    def emit(self) -> None:
        kernel, printer, lines, constants = self._kernel, self._printer, self._printer.lines, self._constants
        rows, end = constants["ROWS"], printer.size(self._tk.extent)
        lines.add(f"down = {printer.size(blocks(self._i.extent, rows))}")
        lines.add(f"program = {program_start(printer)}")
        lines.add("head = program // down")
        printer.variable(self._heads, Value("head"))
        out, query, key = Tile(("ROWS", "VALUES")), Tile(("ROWS", "WIDTH")), Tile(("WIDTH", "KEYS"))
        with (
            axis(printer, out, 0, self._i, "program % down * ROWS", rows) as in_rows,
            axis(printer, out, 1, self._e, "0", constants["VALUES"]) as in_values,
            axis(printer, query, 1, self._dq, "0", constants["WIDTH"]) as in_query,
            axis(printer, key, 0, self._dk, "0", constants["WIDTH"]) as in_key,
        ):
            with printer.over(query, self._env(kernel.q_vars, self._i, self._dq), {**in_rows, **in_query}):
                q = self._products.operand(kernel.q, in_query.get(1))
            lines.add(f"top = tl.full([ROWS, 1], float('-inf'), {self._type})")
            lines.add(f"total = tl.zeros([ROWS, 1], {self._type})")
            lines.add(f"acc = tl.zeros([ROWS, VALUES], {self._type})")
            if kernel.causal:
                end = f"min({end}, (program % down + 1) * ROWS)"
            with lines.block(f"for start in range(0, {end}, KEYS):"):
                self._scores(q, key, in_rows, in_key)
                self._softmax()
                self._values(in_values)
            lines.add("acc = acc / tl.where(total == 0, 1, total)")
            printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
            with printer.over(out, self._env(kernel.domain, self._i, self._e), {**in_rows, **in_values}):
                for store in kernel.stores:
                    printer.store(store)

    def _env(self, variables: tuple[LoopVar, ...], row: LoopVar, column: LoopVar) -> dict[LoopVar, Index]:
        """The four variables of an operand; one of a single value is the same for all heads."""
        places = (*self._place, index_of(row), index_of(column))
        return {v: as_index(0) if v.extent == 1 else place for v, place in zip(variables, places, strict=True)}

    def _scores(self, q: Value, key: Tile, in_rows: Mapping[int, Value], in_key: Mapping[int, Value]) -> None:
        kernel, printer, lines = self._kernel, self._printer, self._printer.lines
        with axis(printer, key, 1, self._tk, "start", self._constants["KEYS"]) as in_keys:
            with printer.over(key, self._env(kernel.k_vars, self._tk, self._dk), {**in_key, **in_keys}):
                k = self._products.operand(kernel.k, in_key.get(0))
            scale = f"tl.full([], {literal(kernel.scale, self._compute)}, {self._type})"
            lines.add(f"scores = {self._products.of(q, k)}.to({self._type}) * {scale}")
            if kernel.mask is not None:
                env = self._env(kernel.mask_vars, self._i, self._tk)
                with printer.over(Tile(("ROWS", "KEYS")), env, {**in_rows, **in_keys}):
                    lines.add(f"scores = scores + {printer.expr(kernel.mask).text}.to({self._type})")
            tests = [mask.text for mask in in_keys.values()] + (["(tk <= i)"] if kernel.causal else [])
            if tests:
                lines.add(f"scores = tl.where({' & '.join(tests)}, scores, float('-inf'))")

    def _softmax(self) -> None:
        exponential = "tl.exp" if self._compute == "float32" else "libdevice.exp"
        add = self._printer.lines.add
        add("new_top = tl.maximum(top, tl.max(scores, 1, keep_dims=True))")
        # A row that has seen nothing but -inf so far must not become NaN.
        add("base = tl.where(new_top == float('-inf'), 0, new_top)")
        add(f"weights = {exponential}(scores - base)")
        add(f"scale = {exponential}(top - base)")
        add("total = total * scale + tl.sum(weights, 1, keep_dims=True)")
        add("acc = acc * scale")
        add("top = new_top")

    def _values(self, in_values: Mapping[int, Value]) -> None:
        kernel, printer = self._kernel, self._printer
        value = Tile(("KEYS", "VALUES"))
        with (
            axis(printer, value, 0, self._tv, "start", self._constants["KEYS"]) as in_keys,
            printer.over(value, self._env(kernel.v_vars, self._tv, self._e), {**in_keys, **in_values}),
        ):
            v = self._products.operand(kernel.v, in_keys.get(0))
        self._products.add("acc", Value.along(f"weights.to({DTYPES[self._operand][0]})", 0, 1), v)
