"""Attention: a program has some rows of queries and goes over the keys and values once, with a running softmax.

Source: Dao, "FlashAttention-2", 2023; the running softmax: Milakov and Gimelshein, 2018.
"""

from __future__ import annotations

import math

from torch_hybrid_backend.engines.triton.functions import DTYPES
from torch_hybrid_backend.engines.triton.printer import Printer, Tile, Value, literal
from torch_hybrid_backend.engines.triton.schedules.matmul import Product, operand_dtype, zero
from torch_hybrid_backend.engines.triton.schedules.tiles import axis, block_for, blocks, power_of_2, program_start
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.kernels import AttentionKernel
from torch_hybrid_backend.sizes.size import product, size_hint

_MIN_TILE = 16


def emit(kernel: AttentionKernel, printer: Printer, target: Target) -> Launch:
    b, h, s, e = kernel.domain
    t, d = kernel.k_vars[2], kernel.k_vars[3]
    most = 512 if target.is_interpreted else 64
    rows, keys = block_for(s.extent, most, _MIN_TILE), block_for(t.extent, most, _MIN_TILE)
    width, value_width = (max(_MIN_TILE, power_of_2(size_hint(v.extent))) for v in (d, e))
    dtype = operand_dtype(target, kernel.q, kernel.k, kernel.v)
    compute = kernel.accumulator.dtype
    type_, lines = DTYPES[compute][0], printer.lines
    lines.add(f"down = {printer.size(blocks(s.extent, rows))}")
    lines.add(f"program = {program_start(printer)}")
    lines.add("head = program // down")
    heads = LoopVar("head", product([b.extent, h.extent]))
    printer.variable(heads, Value("head"))
    head_env = {b: index_of(heads) // h.extent, h: index_of(heads) % h.extent}
    out, scores = Tile(("ROWS", "VALUES")), Tile(("ROWS", "KEYS"))
    query, key, value = Tile(("ROWS", "WIDTH")), Tile(("WIDTH", "KEYS")), Tile(("KEYS", "VALUES"))
    products = Product(printer, dtype, compute, tf32=target.tf32)

    def env(variables: tuple[LoopVar, ...], row: Index, column: Index) -> dict[LoopVar, Index]:
        places = (head_env[b], head_env[h], row, column)
        return {v: zero(v, place) for v, place in zip(variables, places, strict=True)}

    i, j = LoopVar("i", s.extent), LoopVar("e", e.extent)
    dq, dk = LoopVar("dq", d.extent), LoopVar("dk", d.extent)
    tk, tv = LoopVar("tk", t.extent), LoopVar("tv", t.extent)
    with (
        axis(printer, out, 0, i, "program % down * ROWS", rows) as in_rows,
        axis(printer, out, 1, j, "0", value_width) as in_values,
        axis(printer, query, 1, dq, "0", width) as in_width,
        axis(printer, key, 0, dk, "0", width) as in_depth,
    ):
        with printer.over(query, env(kernel.q_vars, index_of(i), index_of(dq)), {**in_rows, **in_width}):
            q = products.operand(kernel.q, in_width.get(1))
        lines.add(f"top = tl.full([ROWS, 1], float('-inf'), {type_})")
        lines.add(f"total = tl.zeros([ROWS, 1], {type_})")
        lines.add(f"acc = tl.zeros([ROWS, VALUES], {type_})")
        end = printer.size(t.extent)
        if kernel.causal:
            end = f"min({end}, (program % down + 1) * ROWS)"
        with (
            lines.block(f"for start in range(0, {end}, KEYS):"),
            axis(printer, key, 1, tk, "start", keys) as in_keys,
        ):
            with printer.over(key, env(kernel.k_vars, index_of(tk), index_of(dk)), {**in_depth, **in_keys}):
                k = products.operand(kernel.k, in_depth.get(0))
            scale = f"tl.full([], {literal(kernel.scale, compute)}, {type_})"
            lines.add(f"scores = {products.of(q, k)}.to({type_}) * {scale}")
            with printer.over(scores, env(kernel.mask_vars, index_of(i), index_of(tk)), {**in_rows, **in_keys}):
                if kernel.mask is not None:
                    lines.add(f"scores = scores + {printer.expr(kernel.mask).text}.to({type_})")
            tests = [mask.text for mask in in_keys.values()]
            if kernel.causal:
                tests.append("(tk <= i)")
            if tests:
                lines.add(f"scores = tl.where({' & '.join(tests)}, scores, float('-inf'))")
            lines.add("new_top = tl.maximum(top, tl.max(scores, 1, keep_dims=True))")
            # A row that has seen nothing but -inf so far must not become NaN.
            lines.add("base = tl.where(new_top == float('-inf'), 0, new_top)")
            exponential = "tl.exp({})" if compute == "float32" else "libdevice.exp({})"
            lines.add(f"weights = {exponential.format('scores - base')}")
            lines.add(f"scale = {exponential.format('top - base')}")
            lines.add("total = total * scale + tl.sum(weights, 1, keep_dims=True)")
            with (
                axis(printer, value, 0, tv, "start", keys) as in_keys,
                printer.over(value, env(kernel.v_vars, index_of(tv), index_of(j)), {**in_keys, **in_values}),
            ):
                v = products.operand(kernel.v, in_keys.get(0))
            lines.add("acc = acc * scale")
            products.add("acc", Value.along(f"weights.to({DTYPES[dtype][0]})", 0, 1), v)
            lines.add("top = new_top")
        lines.add("acc = acc / tl.where(total == 0, 1, total)")
        printer.locals[kernel.accumulator] = lambda _: Value.along("acc", 0, 1)
        outer = {**head_env, s: index_of(i), e: index_of(j)}
        with printer.over(out, outer, {**in_rows, **in_values}):
            for store in kernel.stores:
                printer.store(store)
    assert math.isfinite(kernel.scale)
    programs = product([b.extent, h.extent, blocks(s.extent, rows)])
    constants = {"ROWS": rows, "KEYS": keys, "WIDTH": width, "VALUES": value_width}
    return Launch((programs, 1, 1), constants, warps=4, stages=2)
