"""Attention with products of bfloat16, in place of the kernel that multiplies in float32.

Enters: an `AttentionKernel`. Leaves: the same by AMX's tiles, where the processor has them and sizes are known, and by its dot products.
Operands of bfloat16 are multiplied as they are, and the softmax's weights are rounded to it, as PyTorch's own operator does. On tiles float32
is split into several bfloat16 (`amx_formats`).
The kernel itself stays where heads are only known at run time, where heads of bfloat16 are no whole words of two, and where queries are few:
it reads keys and values where they lie, each once, in bfloat16 if they are, and that is all its time.

Nothing here imports TVM.
"""

from __future__ import annotations

import math
from dataclasses import fields

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.tvm.cpu.amx_formats import FORMATS, PANEL
from torch_hybrid_backend.engines.tvm.cpu.dot_products import bf16_dot_product
from torch_hybrid_backend.engines.tvm.cpu.kernels import WordAttentionKernel
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.ir import Call, Const, Expr, Load
from torch_hybrid_backend.loops.kernels import AttentionKernel, kernel_sizes
from torch_hybrid_backend.loops.ops import ROUND_TARGETS
from torch_hybrid_backend.machine import float32_precision
from torch_hybrid_backend.sizes.size import known_int

# Fewer queries do not pay for packed keys and values.
_LEAST_QUERIES = 5
# Cycles for a multiply-add of float32, and for one by a dot product; for the softmax of a score with its share of packing: 2-core Zen 4, BERT
# at 128 and 512 tokens. Splitting a weight was counted, not measured; the share of their cycles in which tiles multiply is as in `amx`.
_FLOAT32, _DOT_PRODUCT, _SOFTMAX, _SPLIT, _TILE_SHARE = 1 / 16, 1 / 32, 1.7, 0.7, 0.65
# Multiply-adds of float32 on processors with AMX, which have two units for them.
_FLOAT32_BESIDE_TILES = 1 / 25
# No estimate is below the first: so the next way is timed beside it (`codegen.search`). Tiles are not tried where theirs is above the last.
_LEAST_COST, _CERTAIN_COST, _CONCEIVABLE_COST = 0.65, 0.8, 1.25


def word_attention(kernel: AttentionKernel, weight: Packed | None, target: Target) -> list[Variant]:
    """By tiles and by dot products, as far as the processor has them."""
    if not _is_served(kernel):
        return []
    found, is_bfloat16 = list[Variant](), all(map(_is_bfloat16, (kernel.q, kernel.k, kernel.v)))
    if is_bfloat16 and known_int(kernel.q_vars[3].extent) % 2:
        return []
    if {"amx_bf16", "amx_tile"} <= set(target.features) and not kernel_sizes(kernel):
        precision, _ = float32_precision("cpu")
        form = "bfloat16" if is_bfloat16 else "float32" if precision in ("none", "ieee") else "float32 high"
        cost = _tile_cost(kernel, form)
        if cost < _CONCEIVABLE_COST:
            found.append(_variant(f"amx {form}", kernel, form, cost, cost < _CERTAIN_COST))
    if is_bfloat16 and bf16_dot_product(target) is not None:
        each = _multiply_adds(kernel)
        cost = (each * _DOT_PRODUCT + _SOFTMAX) / (each * _FLOAT32 + _SOFTMAX)
        found.append(_variant("bfloat16", kernel, "", cost, not any(variant.is_preferred for variant in found)))
    return found


def _variant(name: str, kernel: AttentionKernel, form: str, cost: float, is_preferred: bool) -> Variant:
    own = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    other = WordAttentionKernel(**own, format=form)
    return Variant(name, (other,), is_exact=False, is_preferred=is_preferred, cost=max(cost, _LEAST_COST))


def _is_served(kernel: AttentionKernel) -> bool:
    queries, depth, width = (v.extent for v in (*kernel.q_vars[2:], kernel.v_vars[3]))
    if isinstance(queries, int) and queries < _LEAST_QUERIES:
        return False
    if not (isinstance(depth, int) and isinstance(width, int) and 0 < kernel.scale < math.inf):
        return False
    return all(e.dtype == "float32" for e in (kernel.q, kernel.k, kernel.v))


def _is_bfloat16(e: Expr) -> bool:
    """Whether every value of a float32 expression certainly is a bfloat16."""
    match e:
        case Load():
            return e.buffer.dtype == "bfloat16"
        case Const(value=value):
            return value == 0
        case Call(op="round", args=(_, Const(value=number))):
            return ROUND_TARGETS[int(number)] == "bfloat16"
        case Call(op="where" | "guard", args=(_, first, second)):
            return _is_bfloat16(first) and _is_bfloat16(second)
    return False


def _tile_cost(kernel: AttentionKernel, name: str) -> float:
    """The estimated time on tiles over that by vectors; infinite where there is nothing to compute."""
    form, each = FORMATS[name], _multiply_adds(kernel)
    queries, keys, depth, width = (
        known_int(v.extent) for v in (kernel.domain[2], kernel.k_vars[2], kernel.q_vars[3], kernel.domain[3])
    )
    if not queries * keys * depth * width:
        return math.inf
    # Steps of a head for scores, of 32 columns for values, each of 2 x 2 tiles.
    steps = form.steps(depth) + -(-width // PANEL)
    panels = -(-queries // PANEL) * -(-keys // PANEL)
    multiplied = panels * steps * len(form.products) * 4 * 16 / _TILE_SHARE / (queries * keys)
    softmax = _SOFTMAX + (_SPLIT if form.splits else 0)
    return (multiplied + softmax) / (each * _FLOAT32_BESIDE_TILES + _SOFTMAX)


def _multiply_adds(kernel: AttentionKernel) -> int:
    """Of each score."""
    return known_int(kernel.q_vars[3].extent) + known_int(kernel.domain[3].extent)
