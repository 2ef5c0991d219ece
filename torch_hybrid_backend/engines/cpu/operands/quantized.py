"""Quantized weights of products (`loops.ir.QuantizedOperand`), packed for kernels that unpack them.

    b[k, n] = (q[k, n] - zero[k // group, n]) * scale[k // group, n]          q of 8 bits, or of 8 bits of which 4 matter
    b[k, n] = table[q[k, n]]                                                  a table of 16 values at most

No form of the weight in float32 is ever made: what is packed ahead has 8 or 4 bits an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx import Node

from torch_hybrid_backend.codegen.operands import OperandPacker, strided_view
from torch_hybrid_backend.core.limits import LEAST_QUANTIZED_ELEMENTS
from torch_hybrid_backend.engines.cpu.dot_products import ROW_PARTS, row_dot_product, row_parts
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b, pack_bytes, pack_nibbles, packed_b_shape
from torch_hybrid_backend.engines.cpu.operations import CpuMatMulOp
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import NIBBLES, tile_n
from torch_hybrid_backend.engines.cpu.weights import Quantized
from torch_hybrid_backend.graph.quantized import depths_of
from torch_hybrid_backend.loops.ir import Buffer, Map, MatMulOp, Value, compute_dtype
from torch_hybrid_backend.loops.quantized import MOST_VALUES
from torch_hybrid_backend.machine import may_round_products
from torch_hybrid_backend.sizes.size import known_int


def keeps_codebook(weights: Node) -> bool:
    """True if kernels read the weights that the node looks up in a table packed, of 4 bits each: others are made ahead, as float32.

    The table is of at most 16 values of float32. The weights are (N, K) or (K, N), K a multiple of 8, and not small.
    """
    table, value = weights.args[0].meta["val"], weights.meta["val"]  # type: ignore[union-attr]
    sizes = *table.shape, *value.shape
    if table.dtype != torch.float32 or not all(isinstance(size, int) for size in sizes):
        return False
    if not 2 <= table.shape[0] <= MOST_VALUES or value.numel() < LEAST_QUANTIZED_ELEMENTS:
        return False
    return all(depth % NIBBLES == 0 for depth in depths_of(weights))


def dequantized_operand(op: MatMulOp, packer: OperandPacker, target: Target) -> CpuMatMulOp | None:
    """The product with its quantized weight packed; None where its right operand is none, or kernels do not take it.

    Kernels take one matrix of more columns than a vector has lanes; of 4 bits, groups of whole words.
    """
    weight = op.quantized
    if weight is None or op.a.shape[0] != 1:
        return None
    _, k, n = map(known_int, op.b.shape)
    if n <= target.lanes or not target.isa.multiplies_quantized:
        return None
    if {compute_dtype(op.a.dtype), compute_dtype(op.out.dtype)} != {"float32"}:
        return None
    if weight.table is not None and not target.isa.looks_up_float32:
        return None
    group = weight.group
    bits = weight.bits if group % NIBBLES == 0 else 8
    if bits == 8 and (weight.table is not None or (group != k and group % NIBBLES)):
        return None
    tile = tile_n(n, target)
    # In words along k, where a row's numbers are multiplied with four weights of a column at once.
    in_words = bits == 4 or (
        weight.integers.dtype == "int8"
        and row_dot_product(group, 1, -(-tile // target.lanes), ROW_PARTS, target) is not None
    )
    low = weight.bounds[0] + 8 if bits == 4 else 0  # what is taken off integers, so that they lie in -8 .. 7
    integers = weight.integers
    parts = [
        _Part(
            integers,
            partial(pack_integers, tile_n=tile, bits=bits, low=low, in_words=in_words),
            ("integers", bits, low, in_words),
        )
    ]
    kept_as = "float32" if isinstance(weight.scales, float) else weight.scales.dtype
    scales = kept_as if kept_as in ("bfloat16", "float16") else "float32"
    for numbers, less, dtype in ((weight.scales, 0, scales), (weight.zero_points, low, "float32")):
        if isinstance(numbers, float):  # the same for all: in the form that the others have
            same = numbers - less
            first = Map((1, k // group, n), integers.dtype, lambda i: integers.at((i[0], i[1] * group, i[2])))
            parts.append(_Part(first, partial(_pack_same, tile_n=tile, number=same), ("same", same)))
        else:
            how = partial(_pack_numbers, tile_n=tile, less=less, dtype=dtype)
            parts.append(_Part(numbers, how, ("numbers", less, dtype)))
    if any(view is None or not view.is_static for view in (strided_view(part.value) for part in parts)):
        return None
    has_zeros = weight.table is None and weight.zero_points != low

    def packed(part: _Part, rows: int, dtype: str) -> Buffer:
        form = packed_b_shape(1, n, rows, tile)
        return packer.pack(part.value, part.ahead, lambda value: Map(form, dtype, value.at), (part.how, tile))

    quantized = Quantized(
        buffer=packed(parts[0], *((k * bits // 32, "int32") if in_words else (k, integers.dtype))),
        bits=bits,
        scales=packed(parts[1], k // group, scales),
        zeros=packed(parts[2], k // group, "float32") if has_zeros else None,
        group=group,
        width=tile,
        table=None if weight.table is None else _packed_table(weight.table, packer),
        row_parts=row_parts(op.a_bits, may_round=may_round_products()),
    )
    return CpuMatMulOp(op.out, op.a, op.b, weight=quantized)


def _packed_table(table: Buffer, packer: OperandPacker) -> Buffer:
    """The codebook, its values where packed integers of 4 bits find them: these are 8 less than indices, modulo 16."""

    def ahead(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, MOST_VALUES - values.shape[0])).roll(MOST_VALUES // 2)

    # A constant is always packed ahead.
    return packer.pack(table, ahead, lambda value: Map((MOST_VALUES,), "float32", value.at), ("table",))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A part of a weight, how it is packed (`ahead`), and the key of this way of packing (`how`)."""

    value: Value
    ahead: Callable[[torch.Tensor], torch.Tensor]
    how: tuple[object, ...]


def pack_integers(q: torch.Tensor, tile_n: int, bits: int, low: int, *, in_words: bool) -> torch.Tensor:
    """Integers of 8 bits as they are; of 4 bits in -8 .. 7, `low` taken off."""
    if bits == 8:
        return (pack_bytes if in_words else pack_b)(q, tile_n)
    return pack_nibbles(q.to(torch.int32) - low, tile_n)


def _pack_numbers(numbers: torch.Tensor, tile_n: int, less: int, dtype: str) -> torch.Tensor:
    return pack_b((numbers.float() - less).to(getattr(torch, dtype)), tile_n)


def _pack_same(like: torch.Tensor, tile_n: int, number: float) -> torch.Tensor:
    """Pack one number in the form that `like` would get."""
    return pack_b(torch.full(like.shape, number), tile_n)
