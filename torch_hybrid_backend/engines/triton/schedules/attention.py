"""Attention: a program has some rows of queries and goes over the keys and values that they can see once, with a running softmax.

- Scores are in base 2: the factor log2(e) is in the literal that scales them.
- Which keys can be seen is derived from the scores' conditions (`loops/attention_scores.py`): a causal mask, a window, a cache that is filled
  up to a position that is only known when the kernel runs. Other blocks of keys are never read, and blocks that are seen whole have no masks.
- Heads that read the same keys are packed as rows of one tile where there are few queries.
- Where there are fewer rows than the GPU has work for, several programs share the keys, and a second kernel combines
  (`kernels.split_along_keys`).

Source: Dao, "FlashAttention-2", 2023; the running softmax: Milakov and Gimelshein, 2018; Dao, Haziza, Massa and Sizov, "Flash-Decoding", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.kernels import FlashKernel
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value, literal
from torch_hybrid_backend.engines.triton.schedules.attention_parts import (
    MIN_TILE,
    Rows,
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
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.sizes.size import product, size_hint

_HALVES = ("float16", "bfloat16")
_PACKED_QUERIES = 64  # heads are packed as rows where there are no more queries than this
_KEYS_OF_PART = 256  # at least, of each program that shares a row's keys
_MOST_PARTS = 64


def launch(kernel: FlashKernel, target: Target) -> Launch:
    rows = _rows(kernel)
    width, values = padded_width(kernel.k_vars[-1]), padded_width(kernel.domain[-1])
    dtype = operand_dtype(target, kernel.q, kernel.k, kernel.v)
    height, keys, warps, stages = _tile(dtype, max(width, values), target)
    height = row_tile(target, rows.row.extent, height)
    keys = row_tile(target, kernel.k_vars[-2].extent, keys)
    if height < 64:
        warps = 4
    constants = {"ROWS": height, "KEYS": keys, "WIDTH": width, "VALUES": values}
    programs = product([rows.heads.extent, blocks(rows.row.extent, height), kernel.splits])
    return Launch((programs, 1, 1), constants, warps, stages)


def _tile(dtype: str, width: int, target: Target) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps, and stages: what keeps the accumulator and the scores in registers.

    sm_80 has half of the shared memory for operands on their way and multiplies by warps, sm_90 by groups of four warps, for which 64 rows are
    least.
    """
    if dtype in _HALVES:
        if width <= 64:
            return 128, 64, 8, 3 if target.capability >= 90 else 2
        if width <= 128:
            return 128, 64, 8, 2
        return (64, 64 if target.capability >= 90 else 32, 4, 2) if width <= 256 else (32, 32, 4, 2)
    if dtype == "float32":
        return (32, 32, 4, 2) if width <= 64 else (32, 16, 4, 2) if width <= 128 else (16, 16, 4, 1)
    return MIN_TILE, MIN_TILE, 4, 1


def _rows(kernel: FlashKernel) -> Rows:
    return Rows(kernel, packed=size_hint(kernel.q_vars[-2].extent) <= _PACKED_QUERIES)


def parts_of_keys(kernel: FlashKernel, target: Target) -> int:
    """The number of programs that share the keys of a row: several where there are fewer than multiprocessors."""
    if target.has_large_tiles:
        return 1
    programs = size_hint(launch(kernel, target).grid[0])
    keys = size_hint(kernel.k_vars[-2].extent)
    return max(1, min(target.multiprocessors // max(1, programs), keys // _KEYS_OF_PART, _MOST_PARTS))


def emit(kernel: FlashKernel, printer: Printer, target: Target, launch: Launch) -> None:
    _Attention(kernel, printer, target, launch.constants).emit()


class _Attention:
    """Writes one kernel's program."""

    def __init__(self, kernel: FlashKernel, printer: Printer, target: Target, constants: Mapping[str, int]) -> None:
        self._kernel = kernel
        self._printer = printer
        self._constants = constants
        self._operand = operand_dtype(target, kernel.q, kernel.k, kernel.v)
        self._compute = kernel.accumulator.dtype
        self._products = Product(printer, self._operand, self._compute, tf32=target.tf32)
        self._rows = _rows(kernel)
        self._key = kernel.score_vars[-1]
        self._scores = Scores(kernel, self._key, self._compute)
        t, d, e = kernel.k_vars[-2].extent, kernel.k_vars[-1].extent, kernel.domain[-1].extent
        self._e, self._dq, self._dk = LoopVar("e", e), LoopVar("dq", d), LoopVar("dk", d)
        self._tk, self._tv = LoopVar("tk", t), LoopVar("tv", t)
        self._visit = Visit(printer, self._scores.visible, t, "KEYS", constants["KEYS"])

    def emit(self) -> None:
        kernel, printer, add, constants = self._kernel, self._printer, self._printer.lines.add, self._constants
        rows, type_ = self._rows, self._scores.type
        split = self._begin()
        out, query, key = Tile(("ROWS", "VALUES")), Tile(("ROWS", "WIDTH")), Tile(("WIDTH", "KEYS"))
        scores = Tile(("ROWS", "KEYS"))
        with (
            axis(printer, out, 0, rows.row, "program % down * ROWS", constants["ROWS"]) as in_rows,
            axis(printer, out, 1, self._e, "0", constants["VALUES"]) as in_values,
            axis(printer, query, 1, self._dq, "0", constants["WIDTH"]) as in_query,
            axis(printer, key, 0, self._dk, "0", constants["WIDTH"]) as in_key,
        ):
            with printer.over(query, rows.env(kernel.q_vars, self._dq), {**in_rows, **in_query}):
                q = self._products.operand(kernel.q, in_query.get(1))
            add(f"top = tl.full([ROWS, 1], float('-inf'), {type_})")
            add(f"total = tl.zeros([ROWS, 1], {type_})")
            add(f"acc = tl.zeros([ROWS, VALUES], {type_})")
            with printer.over(scores, rows.env(kernel.score_vars[:-1]), in_rows):
                self._visit.find(in_rows)
            if kernel.split is not None:
                self._visit.divide("split", kernel.splits)

            def body(whole: bool) -> None:
                self._score(q, key, in_rows, in_key, whole)
                self._softmax()
                self._values(in_values, whole)

            self._visit.loops(body)
            self._end(out, split, in_rows, in_values)

    def _begin(self) -> dict[LoopVar, Index]:
        """Writes which program it is. Gives what stands for the split among the variables of stores."""
        printer, add, rows, kernel = self._printer, self._printer.lines.add, self._rows, self._kernel
        add(f"down = {printer.size(blocks(rows.row.extent, self._constants['ROWS']))}")
        add(f"program = {program_start(printer)}")
        printer.variable(rows.heads, Value("head"))
        if kernel.split is None:
            add("head = program // down")
            return {}
        add(f"split = program // (down * {printer.size(rows.heads.extent)})")
        add(f"head = program // down % {printer.size(rows.heads.extent)}")
        own = LoopVar("split", kernel.splits)
        printer.variable(own, Value("split"))
        return {kernel.split: index_of(own)}

    def _score(
        self, q: Value, key: Tile, in_rows: Mapping[int, Value], in_key: Mapping[int, Value], whole: bool
    ) -> None:
        kernel, printer, add, rows = self._kernel, self._printer, self._printer.lines.add, self._rows
        with along(printer, key, 1, self._tk, "start", whole=self._visit.is_filled(whole)) as in_keys:
            with printer.over(key, rows.key_env(kernel.k_vars, self._tk, self._dk), {**in_key, **in_keys}):
                k = self._products.operand(kernel.k, in_key.get(0))
            add(f"products = {self._products.of(q, k)}.to({self._scores.type})")
            printer.locals[kernel.product] = lambda _: Value.along("products", 0, 1)
            tile = Tile(("ROWS", "KEYS"))
            with printer.over(tile, rows.env(kernel.score_vars, self._tk), {**in_rows, **in_keys}):
                scores = printer.full(printer.expr(self._scores.expr(whole=whole)))
            for mask in in_keys.values():
                scores = Value.along(f"tl.where({mask.text}, {scores.text}, float('-inf'))", 0, 1)
            add(f"scores = {scores.text}")

    def _softmax(self) -> None:
        exp2, add = self._scores.exp2, self._printer.lines.add
        add("new_top = tl.maximum(top, tl.max(scores, 1, keep_dims=True))")
        # A row that has seen nothing but -inf so far must not become NaN.
        add("base = tl.where(new_top == float('-inf'), 0, new_top)")
        add(f"weights = {exp2}(scores - base)")
        add(f"scale = {exp2}(top - base)")
        add("total = total * scale + tl.sum(weights, 1, keep_dims=True)")
        add("acc = acc * scale")
        add("top = new_top")

    def _values(self, in_values: Mapping[int, Value], whole: bool) -> None:
        kernel, printer = self._kernel, self._printer
        value = Tile(("KEYS", "VALUES"))
        with (
            along(printer, value, 0, self._tv, "start", whole=self._visit.is_filled(whole)) as in_keys,
            printer.over(value, self._rows.key_env(kernel.v_vars, self._tv, self._e), {**in_keys, **in_values}),
        ):
            v = self._products.operand(kernel.v, in_keys.get(0))
        self._products.add("acc", Value.along(f"weights.to({DTYPES[self._operand][0]})", 0, 1), v)

    def _end(
        self, out: Tile, split: dict[LoopVar, Index], in_rows: Mapping[int, Value], in_values: Mapping[int, Value]
    ) -> None:
        kernel, printer, add, rows = self._kernel, self._printer, self._printer.lines.add, self._rows
        add("acc = acc / " + ("total" if kernel.nan_rows else "tl.where(total == 0, 1, total)"))
        printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        with printer.over(out, {**rows.env(kernel.domain, self._e), **split}, {**in_rows, **in_values}):
            for store in kernel.stores:
                printer.store(store)
        if not kernel.row_stores:
            return
        natural = f"(top + {self._scores.log2}(total)) * {math.log(2)!r}"
        add(f"sums = tl.where(total == 0, {literal(kernel.empty, self._compute)}, {natural})")
        printer.locals[kernel.log_sum_exp] = lambda _: Value.along("sums", 0)
        with printer.over(out, {**rows.env(kernel.row_vars), **split}, in_rows):
            for store in kernel.row_stores:
                printer.store(store)
