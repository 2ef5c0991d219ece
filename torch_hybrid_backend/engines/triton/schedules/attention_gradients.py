"""Gradients of attention: of the queries, by programs over rows of queries that visit the keys; of keys and values, by programs over keys that
visit the queries. Weights are computed again from the log-sum-exp. Nothing is added up in memory: results are the same in every run.

Source: Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.kernels import GradientKernel, KeyGradientKernel
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value, literal
from torch_hybrid_backend.engines.triton.schedules.attention_parts import (
    LOG2_E,
    Scores,
    Visit,
    along,
    padded_width,
    row_tile,
)
from torch_hybrid_backend.engines.triton.schedules.matmul import Product, operand_dtype
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, blocks, program_start
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.sizes.size import product

_HALVES = ("float16", "bfloat16")


def launch(kernel: GradientKernel, target: Target) -> Launch:
    width, values = padded_width(kernel.k_vars[-1]), padded_width(kernel.v_vars[-1])
    most, warps = _tile(_operand(kernel, target), max(width, values))
    s, t = kernel.q_vars[-2].extent, kernel.k_vars[-2].extent
    constants = {
        "ROWS": row_tile(target, s, most),
        "KEYS": row_tile(target, t, most),
        "WIDTH": width,
        "VALUES": values,
    }
    pieces = blocks(t, constants["KEYS"]) if isinstance(kernel, KeyGradientKernel) else blocks(s, constants["ROWS"])
    return Launch((product([*(v.extent for v in kernel.domain[:-2]), pieces]), 1, 1), constants, warps, stages=2)


def _tile(dtype: str, width: int) -> tuple[int, int]:
    """Rows and keys of a tile, and warps: a program holds accumulators, scores, weights and their gradients in registers."""
    if dtype in _HALVES:
        return (64, 4) if width <= 64 else (64, 8) if width <= 128 else (32, 8)
    if dtype == "float32":
        return (32, 4) if width <= 64 else (16, 4)
    return 16, 4


def _operand(kernel: GradientKernel, target: Target) -> str:
    return operand_dtype(target, kernel.q, kernel.k, kernel.v, kernel.grad)


def emit(kernel: GradientKernel, printer: Printer, target: Target, launch: Launch) -> None:
    if isinstance(kernel, KeyGradientKernel):
        _ForKeys(kernel, printer, target, launch.constants).emit(kernel)
    else:
        _ForQueries(kernel, printer, target, launch.constants).emit()


class _Gradient:
    """The base of both programs. Operands are blocks of whole rows: `i` runs along queries, `t` along keys."""

    def __init__(self, kernel: GradientKernel, printer: Printer, target: Target, constants: Mapping[str, int]) -> None:
        self.kernel, self.printer, self.constants = kernel, printer, constants
        operand = _operand(kernel, target)
        self.compute = kernel.accumulator.dtype
        self.products = Product(printer, operand, self.compute, tf32=target.tf32)
        self.operand_type = DTYPES[operand][0]
        self.heads = LoopVar("head", product([v.extent for v in kernel.domain[:-2]]))
        self.member = LoopVar("member", 1)
        self.i, self.t = LoopVar("i", kernel.q_vars[-2].extent), LoopVar("t", kernel.k_vars[-2].extent)

    def begin(self, extent: LoopVar, block: str) -> None:
        printer, add = self.printer, self.printer.lines.add
        add(f"down = {printer.size(blocks(extent.extent, self.constants[block]))}")
        add(f"program = {program_start(printer)}")
        add("head = program // down")
        printer.variable(self.heads, Value("head"))

    def lead(self) -> list[Index]:
        """The leading dimensions of the queries."""
        rest, places = index_of(self.heads), list[Index]()
        for extent in reversed([v.extent for v in self.kernel.domain[:-2]]):
            places.append(as_index(0) if extent == 1 else rest % extent)
            rest = rest // extent
        places[0] = places[0] * self.member.extent + index_of(self.member)
        return places[::-1]

    def env(self, variables: Sequence[LoopVar], *others: LoopVar) -> dict[LoopVar, Index]:
        """The variables (*lead, ...) of an operand; one of a single value is the same for all heads."""
        places = (*self.lead(), *map(index_of, others))
        return {v: as_index(0) if v.extent == 1 else place for v, place in zip(variables, places, strict=True)}

    def block(
        self, e: Expr, variables: Sequence[LoopVar], row: LoopVar, start: str, blocks_: tuple[str, str], whole: bool
    ) -> Value:
        """A block of an operand, 0 where there is no element. `blocks_`: the names of its extents."""
        printer, tile = self.printer, Tile(blocks_)
        name = printer.lines.name(f"{row.name}_")
        own, column = LoopVar(name, row.extent), LoopVar(printer.lines.name("c"), variables[-1].extent)
        with (
            along(printer, tile, 0, own, start, whole=whole) as in_rows,
            axis(printer, tile, 1, column, "0", self.constants[blocks_[1]]) as in_columns,
            printer.over(tile, self.env(variables, own, column), {**in_rows, **in_columns}),
        ):
            masks = [*in_rows.values(), *in_columns.values()]
            inside = Value(" & ".join(m.text for m in masks), frozenset().union(*(m.dims for m in masks)))
            return self.products.operand(e, inside if masks else None)

    def statistics(self, tile: Tile, dim: int, in_rows: Mapping[int, Value]) -> tuple[str, str]:
        """The log-sum-exp in base 2 and delta, along a tile's dimension of queries."""
        kernel, printer = self.kernel, self.printer
        with printer.over(tile, self.env(kernel.row_vars, self.i), in_rows):
            log_sum_exp, delta = printer.expr(kernel.log_sum_exp), printer.expr(kernel.delta)
            base = printer.let(f"{log_sum_exp.text} * {literal(LOG2_E, self.compute)}", log_sum_exp.dims)
        assert base.dims | delta.dims <= frozenset((dim,))
        return base.text, delta.text

    def scores(self, scores: Scores, tile: Tile, product_: str, bounds: Mapping[int, Value], whole: bool) -> None:
        """Writes `scores` of a tile of products."""
        kernel, printer = self.kernel, self.printer
        printer.lines.add(f"products = {product_}.to({scores.type})")
        printer.locals[kernel.product] = lambda _: Value.along("products", 0, 1)
        with printer.over(tile, self.env(kernel.score_vars, self.i, self.t), bounds):
            text = printer.full(printer.expr(scores.expr(whole=whole))).text
        if bounds:
            text = f"tl.where({' & '.join(mask.text for mask in bounds.values())}, {text}, float('-inf'))"
        printer.lines.add(f"scores = {text}")

    def store(self, name: str, tile: Tile, row: LoopVar, in_rows: Mapping[int, Value], *, of_values: bool) -> None:
        """Writes an accumulator's stores."""
        kernel, printer = self.kernel, self.printer
        local, variables, stores = kernel.accumulator, kernel.domain, kernel.stores
        if of_values:
            assert isinstance(kernel, KeyGradientKernel)
            local, variables, stores = kernel.value_accumulator, kernel.value_vars, kernel.value_stores
        column = LoopVar(printer.lines.name("c"), variables[-1].extent)
        printer.locals[local] = lambda _: Value.along(name, 0, 1)
        lead = self.lead() if not isinstance(kernel, KeyGradientKernel) else self._own_lead()
        places = (*lead, index_of(row), index_of(column))
        env = {v: as_index(0) if v.extent == 1 else place for v, place in zip(variables, places, strict=True)}
        with (
            axis(printer, tile, 1, column, "0", self.constants[tile.blocks[1]]) as in_columns,
            printer.over(tile, env, {**in_rows, **in_columns}),
        ):
            for store in stores:
                printer.store(store)

    def _own_lead(self) -> list[Index]:
        member, self.member = self.member, LoopVar("member", 1)
        try:
            return self.lead()
        finally:
            self.member = member


def _transposed(value: Value) -> Value:
    return Value(f"tl.trans({value.text})", value.dims)


class _ForQueries(_Gradient):
    """For a block of queries: acc = sum over keys of d @ k."""

    def emit(self) -> None:
        kernel, printer, add = self.kernel, self.printer, self.printer.lines.add
        scores = Scores(kernel, kernel.score_vars[-1], self.compute)
        self.begin(self.i, "ROWS")
        add("first = program % down * ROWS")
        tile, out = Tile(("ROWS", "KEYS")), Tile(("ROWS", "WIDTH"))
        whole = isinstance(self.i.extent, int) and self.i.extent % self.constants["ROWS"] == 0
        q = self.block(kernel.q, kernel.q_vars, self.i, "first", ("ROWS", "WIDTH"), whole)
        grad = self.block(kernel.grad, kernel.grad_vars, self.i, "first", ("ROWS", "VALUES"), whole)
        visit = Visit(printer, scores.visible, self.t.extent, "KEYS", self.constants["KEYS"])
        with along(printer, tile, 0, self.i, "first", whole=whole) as in_rows:
            base, delta = self.statistics(tile, 0, in_rows)
            with printer.over(tile, self.env(kernel.score_vars[:-1], self.i), in_rows):
                visit.find(in_rows)
            add(f"acc = tl.zeros([ROWS, WIDTH], {scores.type})")

            def body(whole: bool) -> None:
                filled = visit.is_filled(whole)
                k = self.block(kernel.k, kernel.k_vars, self.t, "start", ("KEYS", "WIDTH"), filled)
                v = self.block(kernel.v, kernel.v_vars, self.t, "start", ("KEYS", "VALUES"), filled)
                with along(printer, tile, 1, self.t, "start", whole=filled) as in_keys:
                    bounds = {**in_rows, **in_keys}
                    self.scores(scores, tile, self.products.of(q, _transposed(k)), bounds, whole)
                add(f"weights = {scores.exp2}(scores - {base})")
                add(f"d = weights * ({self.products.of(grad, _transposed(v))} - {delta})")
                self.products.add("acc", Value.along(f"d.to({self.operand_type})", 0, 1), k)

            visit.loops(body)
            add(f"acc = acc * {literal(kernel.scale, self.compute)}")
            self.store("acc", out, self.i, in_rows, of_values=False)


class _ForKeys(_Gradient):
    """For a block of keys: acc = sum over queries of d^T @ q, and values = that of weights^T @ grad; all heads that read the keys in turn."""

    def emit(self, kernel: KeyGradientKernel) -> None:
        printer, add = self.printer, self.printer.lines.add
        scores = Scores(kernel, kernel.score_vars[-2], self.compute)
        self.member = LoopVar("member", kernel.q_vars[-3].extent // kernel.domain[-3].extent)
        self.begin(self.t, "KEYS")
        add("first = program % down * KEYS")
        tile = Tile(("KEYS", "ROWS"))
        whole = isinstance(self.t.extent, int) and self.t.extent % self.constants["KEYS"] == 0
        visit = Visit(printer, scores.visible, self.i.extent, "ROWS", self.constants["ROWS"])
        with ExitStack() as heads, along(printer, tile, 0, self.t, "first", whole=whole) as in_keys:
            add(f"acc = tl.zeros([KEYS, WIDTH], {scores.type})")
            add(f"values = tl.zeros([KEYS, VALUES], {scores.type})")
            if self.member.extent != 1:
                printer.variable(self.member, Value("member"))
                heads.enter_context(printer.lines.block(f"for member in range(0, {printer.size(self.member.extent)}):"))
            k = self.block(kernel.k, kernel.k_vars, self.t, "first", ("KEYS", "WIDTH"), whole)
            v = self.block(kernel.v, kernel.v_vars, self.t, "first", ("KEYS", "VALUES"), whole)
            at_keys = self.env((*kernel.score_vars[:-2], kernel.score_vars[-1]), self.t)
            with printer.over(tile, at_keys, in_keys):
                visit.find(in_keys)

            def body(whole: bool) -> None:
                filled = visit.is_filled(whole)
                q = self.block(kernel.q, kernel.q_vars, self.i, "start", ("ROWS", "WIDTH"), filled)
                grad = self.block(kernel.grad, kernel.grad_vars, self.i, "start", ("ROWS", "VALUES"), filled)
                with along(printer, tile, 1, self.i, "start", whole=filled) as in_rows:
                    base, delta = self.statistics(tile, 1, in_rows)
                    bounds = {**in_keys, **in_rows}
                    self.scores(scores, tile, self.products.of(k, _transposed(q)), bounds, whole)
                add(f"weights = {scores.exp2}(scores - {base})")
                self.products.add("values", Value.along(f"weights.to({self.operand_type})", 0, 1), grad)
                add(f"d = weights * ({self.products.of(v, _transposed(grad))} - {delta})")
                self.products.add("acc", Value.along(f"d.to({self.operand_type})", 0, 1), q)

            visit.loops(body)
            heads.close()
            add(f"acc = acc * {literal(kernel.scale, self.compute)}")
            self.store("acc", Tile(("KEYS", "WIDTH")), self.t, in_keys, of_values=False)
            self.store("values", Tile(("KEYS", "VALUES")), self.t, in_keys, of_values=True)
