"""Attention of bfloat16 with products of bfloat16, in place of the kernel that widens its operands to float32.

Enters: an `AttentionKernel`. Leaves: the same by the processor's dot products, and by AMX's tiles where it has them and sizes are known. Both
round the softmax's weights to bfloat16, as PyTorch's own operator does. The kernel that widens stays where operands are not of bfloat16, where
heads are odd or only known at run time, and where queries are few: it reads keys and values where they lie, each once, and that is all its time.

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
from torch_hybrid_backend.sizes.size import known_int

# Fewer queries do not pay for packed keys and values.
_LEAST_QUERIES = 5
# Cycles for a score: a multiply-add of float32, one by a dot product, the softmax with its share of packing; and the share of their cycles in
# which tiles multiply. 2-core Zen 4, BERT at 128 and 512 tokens; tiles as in `amx`.
_WIDENED, _WORD, _SOFTMAX, _TILE_SHARE = 1 / 16, 1 / 32, 1.7, 0.65
# No estimate is below this, so that the kernel that widens is timed beside it (`codegen.search`).
_LEAST_COST = 0.65


def word_attention(kernel: AttentionKernel, weight: Packed | None, target: Target) -> list[Variant]:
    """By tiles and by dot products, as far as the processor has them."""
    has_tiles = {"amx_bf16", "amx_tile"} <= set(target.features)
    has_words = bf16_dot_product(target) is not None
    if not (has_tiles or has_words) or not _is_served(kernel):
        return []
    found = []
    if has_tiles and not kernel_sizes(kernel):
        found.append(_variant("amx bfloat16", kernel, _tile_cost(kernel), True))
    if has_words:
        found.append(_variant("bfloat16", kernel, _cost(kernel, _WORD), False, is_preferred=not found))
    return found


def _variant(name: str, kernel: AttentionKernel, cost: float, on_tiles: bool, is_preferred: bool = True) -> Variant:
    own = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    other = WordAttentionKernel(**own, on_tiles=on_tiles)
    return Variant(name, (other,), is_exact=False, is_preferred=is_preferred, cost=max(cost, _LEAST_COST))


def _is_served(kernel: AttentionKernel) -> bool:
    queries, depth, width = (v.extent for v in (*kernel.q_vars[2:], kernel.v_vars[3]))
    if isinstance(queries, int) and queries < _LEAST_QUERIES:
        return False
    if not isinstance(depth, int) or depth % 2 or not isinstance(width, int) or not (0 < kernel.scale < math.inf):
        return False
    return all(map(_is_bfloat16, (kernel.q, kernel.k, kernel.v)))


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


def _cost(kernel: AttentionKernel, multiply_add: float) -> float:
    """The estimated time, where a multiply-add takes so many cycles, over that of the kernel that widens."""
    each = _multiply_adds(kernel)
    return (each * multiply_add + _SOFTMAX) / (each * _WIDENED + _SOFTMAX)


def _tile_cost(kernel: AttentionKernel) -> float:
    queries, keys = known_int(kernel.domain[2].extent), known_int(kernel.k_vars[2].extent)
    form = FORMATS["bfloat16"]
    steps = form.steps(known_int(kernel.q_vars[3].extent)) + -(-known_int(kernel.domain[3].extent) // form.depth)
    scores = max(queries * keys, 1)
    panels = -(-queries // PANEL) * -(-keys // PANEL)
    cycles = panels * steps * 4 * 16 / _TILE_SHARE / scores
    return _cost(kernel, cycles / _multiply_adds(kernel))


def _multiply_adds(kernel: AttentionKernel) -> int:
    """Of each score."""
    return known_int(kernel.q_vars[3].extent) + known_int(kernel.domain[3].extent)
