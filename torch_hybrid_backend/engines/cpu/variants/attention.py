"""Attention (SDPA) in bfloat16 or int8, in place of the kernel that multiplies in float32.

Enters: an `AttentionKernel`. Leaves: the same by AMX's tiles, where the processor has them and sizes are known, and by its dot products.

- bfloat16 operands are multiplied as they are, and the softmax's weights are rounded to bfloat16, as PyTorch's own operator does.
- float32 and float16 operands are split into several bfloat16, on tiles (`amx_formats`).
- Dequantized integers of 8 bits are one bfloat16 each, on tiles; their scales are applied behind the products. The softmax's weights are split
  into three, and nothing is rounded that float32 would not round. Weights are rounded to bfloat16 where the operands were to be.
- Without tiles, scores of dequantized integers are made by int8 dot products.

The float32 kernel itself stays where heads are only known at run time, where heads of bfloat16 have an odd number of elements, and where
queries are few: that kernel reads keys and values where they lie, each once, in bfloat16 if they are, and needs no more time than that.

Nothing here imports TVM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.cpu.dot_products import bf16_dot_product, integer_dot_product
from torch_hybrid_backend.engines.cpu.kernels import Bf16AttentionKernel, Int8AttentionKernel
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, PANEL
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.fusion import replace_loads
from torch_hybrid_backend.loops.ir import Const, Expr, Load, is_rounded
from torch_hybrid_backend.loops.kernels import AttentionKernel, as_kind, kernel_sizes
from torch_hybrid_backend.loops.ops import cast, const, mul, sub
from torch_hybrid_backend.loops.quantized import affine
from torch_hybrid_backend.machine import EXACT_PRECISIONS, float32_precision
from torch_hybrid_backend.sizes.size import known_int, size_hint

# Fewer queries do not pay for packed keys and values.
_LEAST_QUERIES = 5
# Cycles for a multiply-add of float32, and for one by a dot product of bfloat16, and of int8; for the softmax of a score with its share of
# packing: 2-core Zen 4, BERT at 128 and 512 tokens.
_FLOAT32, _BF16_DOT_PRODUCT, _INT8_DOT_PRODUCT, _SOFTMAX = 1 / 16, 1 / 32, 1 / 64, 1.7
# On processors with AMX: the share of their cycles in which tiles multiply; for the softmax of a score, and for splitting its weight; for a row
# of queries with its share of packing, and where operands are split; by vectors, for a multiply-add, and for a row: 2-core Granite Rapids, 128
# to 512 tokens, heads of 64 and 128.
_TILE_SHARE, _TILE_SOFTMAX, _SPLIT, _TILE_ROW, _SPLIT_ROW = 0.65, 0.75, 0.5, 60, 250
_VECTORS_BESIDE_TILES, _VECTOR_ROW = 1 / 30, 60
_LEAST = {"int8": -128, "uint8": 0}
# No estimate is below the first: so the next way is timed beside it (`codegen.search`). Tiles are not tried where theirs is above the last.
_LEAST_COST, _CERTAIN_COST, _CONCEIVABLE_COST = 0.65, 0.8, 1.25


def low_precision_attention(kernel: AttentionKernel, weight: Packed | None, target: Target) -> list[Variant]:
    """The kernel by AMX's tiles and by dot products, as far as the processor has them."""
    if not _is_served(kernel):
        return []
    found, operands = list[Variant](), (kernel.q, kernel.k, kernel.v)
    is_bfloat16, is_float16 = (all(is_rounded(e, dtype) for e in operands) for dtype in ("bfloat16", "float16"))
    if is_bfloat16 and known_int(kernel.q_vars[3].extent) % 2:
        return []
    is_known = not kernel_sizes(kernel)
    if "bfloat16" in target.isa.tiles and (is_known or (is_bfloat16 and isinstance(kernel.k, Load))):
        precision, _ = float32_precision("cpu")
        form = "float32" if precision in EXACT_PRECISIONS else "float32 high"
        form = "bfloat16" if is_bfloat16 else "float16 split" if is_float16 else form
        name, own, parts = f"amx {form}", kernel, FORMATS[form].parts
        if is_known and (integers := _without_scales(kernel)) is not None:
            # Weights are rounded to bfloat16 if the operands were to be.
            name, own, form = "amx int8 as bfloat16", integers, "bfloat16"
            parts = FORMATS["bfloat16" if is_bfloat16 else "float32"].parts
        cost = _tile_cost(own, form, parts)
        if cost < _CONCEIVABLE_COST:
            found.append(_bf16_variant(name, own, form, cost, cost < _CERTAIN_COST, parts))
    if is_bfloat16 and bf16_dot_product(target) is not None:
        each = _multiply_adds(kernel)
        cost = (each * _BF16_DOT_PRODUCT + _SOFTMAX) / (each * _FLOAT32 + _SOFTMAX)
        found.append(_bf16_variant("bfloat16", kernel, "", cost, not any(variant.is_preferred for variant in found)))
    if not found and (int8 := _int8_variant(kernel, target)) is not None:
        found.append(int8)
    return found


def _int8_variant(kernel: AttentionKernel, target: Target) -> Variant | None:
    """The kernel with scores by int8 dot products; None where the processor has none, or queries and keys are not dequantized integers."""
    dot = integer_dot_product("uint8", "int8", target, knows_sums=True)
    depth = known_int(kernel.q_vars[3].extent)
    q, k = _scaled_integer(kernel.q), _scaled_integer(kernel.k)
    # By vpdpbusd and usdot, whose left operand is without signs.
    if dot is None or (dot.left, dot.group) != ("uint8", 4) or depth % dot.group or q is None or k is None:
        return None
    scale = kernel.scale * q.scale * k.scale
    if k.integer.dtype != "int8" or k.zero or not 0 < scale < math.inf:
        return None
    columns = known_int(kernel.domain[3].extent)
    cost = depth * _INT8_DOT_PRODUCT + columns * _FLOAT32 + _SOFTMAX
    cost /= (depth + columns) * _FLOAT32 + _SOFTMAX
    other = as_kind(kernel, Int8AttentionKernel, q=q.integer, k=k.integer, scale=scale, zero=q.zero)
    return Variant("int8", (other,), is_exact=False, is_preferred=True, cost=max(cost, _LEAST_COST))


def _bf16_variant(
    name: str, kernel: AttentionKernel, form: str, cost: float, is_preferred: bool, weight_parts: int = 1
) -> Variant:
    other = as_kind(kernel, Bf16AttentionKernel, format=form, weight_parts=weight_parts)
    return Variant(name, (other,), is_exact=False, is_preferred=is_preferred, cost=max(cost, _LEAST_COST))


def _is_served(kernel: AttentionKernel) -> bool:
    queries, depth, width = (v.extent for v in (*kernel.q_vars[2:], kernel.v_vars[3]))
    if isinstance(queries, int) and queries < _LEAST_QUERIES:
        return False
    if not (isinstance(depth, int) and isinstance(width, int) and 0 < kernel.scale < math.inf):
        return False
    return all(e.dtype == "float32" for e in (kernel.q, kernel.k, kernel.v))


@dataclass(frozen=True, slots=True)
class _ScaledInteger:
    """(integer - zero) * scale, of an integer of 8 bits."""

    integer: Expr
    zero: int
    scale: float


def _scaled_integer(operand: Expr) -> _ScaledInteger | None:
    """An operand as a scaled integer; None where it is none, or its scale or zero point is no constant."""
    found = affine(operand)
    if found is None or not all(isinstance(scale, Const) for scale in found.scales):
        return None
    zero = 0
    if found.zero is not None:
        if not isinstance(found.zero, Const) or not _LEAST[found.integer.dtype] <= found.zero.value <= 255:
            return None
        zero = int(found.zero.value)
    return _ScaledInteger(
        found.integer, zero, math.prod(float(scale.value) for scale in found.scales if isinstance(scale, Const))
    )


def _without_scales(kernel: AttentionKernel) -> AttentionKernel | None:
    """The kernel with dequantized operands before their scales, which follow the products; None where an operand is no such value."""
    operands: list[Expr] = []
    scales: list[float] = []
    for operand in (kernel.q, kernel.k, kernel.v):
        found = _scaled_integer(operand)
        if found is None:
            return None
        number: Expr = cast(found.integer, "float32")
        if found.zero:
            # Then it is -255 to 255, which bfloat16 holds as well.
            number = sub(number, const(float(found.zero), "float32"))
        operands.append(number)
        scales.append(found.scale)
    of_q, of_k, of_v = scales
    scale = kernel.scale * of_q * of_k
    if not 0 < scale < math.inf:
        return None

    def scaled(load: Load) -> Expr | None:
        return mul(load, const(of_v, "float32")) if load.buffer is kernel.accumulator else None

    q, k, v = operands
    stores = tuple(replace(store, value=replace_loads(store.value, scaled)) for store in kernel.stores)
    return replace(kernel, q=q, k=k, v=v, scale=scale, stores=stores)


def _tile_cost(kernel: AttentionKernel, name: str, weight_parts: int) -> float:
    """The estimated time on tiles over that by vectors; infinite where there is nothing to compute."""
    form, each = FORMATS[name], _multiply_adds(kernel)
    queries, keys, depth, width = (
        size_hint(v.extent) for v in (kernel.domain[2], kernel.k_vars[2], kernel.q_vars[3], kernel.domain[3])
    )
    if not queries * keys * depth * width:
        return math.inf
    # Steps of a head for scores, of 32 columns for values, each of 2 x 2 tiles.
    steps = form.steps(depth) * len(form.products) + -(-width // PANEL) * max(len(form.products), weight_parts)
    panels = -(-queries // PANEL) * -(-keys // PANEL)
    multiplied = panels * steps * 4 * 16 / _TILE_SHARE / (queries * keys)
    softmax = _TILE_SOFTMAX + (_SPLIT if weight_parts > 1 else 0)
    row = _SPLIT_ROW if form.splits else _TILE_ROW
    return (multiplied + softmax + row / keys) / (each * _VECTORS_BESIDE_TILES + _VECTOR_ROW / keys)


def _multiply_adds(kernel: AttentionKernel) -> int:
    """Multiply-adds of each score."""
    return known_int(kernel.q_vars[3].extent) + known_int(kernel.domain[3].extent)
