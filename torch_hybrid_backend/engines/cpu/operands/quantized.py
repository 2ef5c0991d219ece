"""Right operands of products that are dequantised weights: recognised by what they compute, and packed for kernels that unpack them.

    b[k, n] = (q[k, n] - zero[k // group, n]) * scale[k // group, n]          q of 8 bits, or of 8 bits of which 4 matter
    b[k, n] = table[q[k, n]]                                                  a table of 16 values at most

No form of the weight in float32 is ever made: what is packed ahead has 8 or 4 bits an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from torch_hybrid_backend.codegen.operands import OperandPacker, strided_view
from torch_hybrid_backend.engines.cpu.dot_products import ROW_PARTS, row_dot_product, row_parts
from torch_hybrid_backend.engines.cpu.operands.packing import pack_b, pack_bytes, pack_nibbles, packed_b_shape
from torch_hybrid_backend.engines.cpu.operations import CpuMatMulOp
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import NIBBLES, tile_n
from torch_hybrid_backend.engines.cpu.weights import Quantized
from torch_hybrid_backend.loops import ops as scalar
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar
from torch_hybrid_backend.loops.integer_products import affine, bounded
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, Load, Map, MatMulOp, compute_dtype, domain_vars
from torch_hybrid_backend.loops.lookups import MOST_VALUES, lookup
from torch_hybrid_backend.machine import may_round_products


def dequantized_operand(op: MatMulOp, packer: OperandPacker, target: Target) -> CpuMatMulOp | None:
    """The product with its dequantised weight packed; None where its right operand is none, or kernels do not take it.

    They take whole groups, one matrix of known sizes and more columns than a vector has lanes; of 4 bits, groups of whole words.
    """
    _, k, n = op.b.shape
    if op.a.shape[0] != 1 or op.b.shape[0] != 1 or not isinstance(k, int) or not isinstance(n, int):
        return None
    if isinstance(op.b, Buffer) or n <= target.lanes or not target.isa.multiplies_quantized:
        return None
    if {compute_dtype(op.a.dtype), compute_dtype(op.out.dtype)} != {"float32"}:
        return None
    index = domain_vars(op.b.shape, "w")
    weight = _Weight.of(op.b.at(index))
    if weight is None:
        return None
    if weight.table is not None and not target.isa.looks_up_float32:
        return None
    groups = {_group(load, index[1], k) for load in (weight.scale, weight.zero) if isinstance(load, Load)} or {k}
    group = groups.pop()
    if groups or group is None or k % group:
        return None
    bits = 4 if weight.bounds[1] - weight.bounds[0] < 16 and group % NIBBLES == 0 else 8
    if bits == 8 and (weight.table is not None or (group != k and group % NIBBLES)):
        return None

    def every(step: int, of: Callable[[_Weight], Expr]) -> Map:
        """The elements that the weight reads for every `step`-th k."""

        def at(place: tuple[Index, ...]) -> Expr:
            found = _Weight.of(op.b.at((place[0], place[1] * step, place[2])))
            assert found is not None
            return of(found)

        read = of(weight)
        return Map((1, k // step, n), "float32" if isinstance(read, Const) else read.dtype, at)

    tile = tile_n(n, target)
    # In words along k, where a row's numbers are multiplied with four weights of a column at once.
    in_words = bits == 4 or (
        weight.integers.dtype == "int8"
        and row_dot_product(group, 1, -(-tile // target.lanes), ROW_PARTS, target) is not None
    )
    low = weight.bounds[0] + 8 if bits == 4 else 0  # what is taken off integers, so that they lie in -8 .. 7
    integers, first = every(1, lambda w: w.integers), every(group, lambda w: w.integers)
    parts = [
        _Part(
            integers,
            partial(_pack_integers, tile_n=tile, bits=bits, low=low, in_words=in_words),
            ("integers", bits, low, in_words),
        )
    ]
    kept_as = weight.scale.buffer.dtype if isinstance(weight.scale, Load) else "float32"
    scales = kept_as if kept_as in ("bfloat16", "float16") else "float32"
    numbers: tuple[tuple[Callable[[_Weight], Number], int, str], ...] = (
        (lambda w: w.scale, 0, scales),
        (lambda w: w.zero, low, "float32"),
    )
    for of, less, dtype in numbers:
        number = of(weight)
        if isinstance(number, Load):
            how = partial(_pack_numbers, tile_n=tile, less=less, dtype=dtype)
            parts.append(_Part(every(group, of), how, ("numbers", less, dtype)))
        else:  # the same for all: in the form that the others have
            same = float(number.value) - less
            parts.append(_Part(first, partial(_pack_same, tile_n=tile, number=same), ("same", same)))
    if any(view is None or not view.is_static for view in (strided_view(part.value) for part in parts)):
        return None
    has_zeros = weight.table is None and (isinstance(weight.zero, Load) or float(weight.zero.value) != low)

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
    """Its values where packed integers of 4 bits, which are 8 less than places, say modulo 16; in each call as in memory."""

    def ahead(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, MOST_VALUES - values.shape[0])).roll(MOST_VALUES // 2)

    # A constant is always packed ahead.
    return packer.pack(table, ahead, lambda value: Map((MOST_VALUES,), "float32", value.at), ("table",))


Number = Load | Const


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Something that is packed of a weight: what of it, how, and what this way of packing is known by."""

    value: Map
    ahead: Callable[[torch.Tensor], torch.Tensor]
    how: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """An element of a dequantised weight: what it is read from. `bounds`: what integers are clamped to, as they are packed; they are places in
    `table`, if there is one."""

    integers: Expr
    bounds: tuple[int, int]
    scale: Number
    zero: Number
    table: Buffer | None = None

    @staticmethod
    def of(e: Expr) -> _Weight | None:
        """None where an expression is not of this form, or one of its parts is neither a number nor simply read from a constant."""
        if (element := lookup(e)) is not None:
            low, high = bounds = 0, element.size - 1
            place = scalar.call("max", element.place, scalar.literal(low, element.place.dtype))
            place = scalar.call("min", place, scalar.literal(high, place.dtype))
            return _Weight(place, bounds, Const("float32", 1.0), Const("int32", 0), element.table)
        found = affine(e)
        if found is None or len(found.scales) > 1:
            return None
        integers, bounds = bounded(found.integer)
        scale = _number(found.scales[0]) if found.scales else Const("float32", 1.0)
        zero = Const("int32", 0) if found.zero is None else _number(found.zero)
        if not isinstance(integers, Load) or scale is None or scale.dtype != "float32" or zero is None:
            return None
        if not all(part.buffer.constant for part in (integers, scale, zero) if isinstance(part, Load)):
            return None
        return _Weight(found.integer, bounds, scale, zero)


def _number(e: Expr) -> Number | None:
    """A number, or what is read to be cast."""
    while isinstance(e, Call) and e.op == "cast":
        e = e.args[0]
    return e if isinstance(e, Load | Const) else None


def _group(load: Load, k: Index, extent: int) -> int | None:
    """The number of neighbours along k that read the same element; None where they do not form groups that lie one after the other."""
    variables, sizes = {atom for atom, _ in k.terms}, set()
    for index in load.index:
        for atom, _ in index.terms:
            if isinstance(atom, FloorDiv) and atom.numerator == k and isinstance(atom.divisor, int):
                sizes.add(atom.divisor)
            elif not isinstance(atom, LoopVar) or atom in variables:
                return None
    return extent if not sizes else sizes.pop() if len(sizes) == 1 else None


def _pack_integers(q: torch.Tensor, tile_n: int, bits: int, low: int, *, in_words: bool) -> torch.Tensor:
    """Integers of 8 bits as they are; of 4 bits in -8 .. 7, `low` taken off."""
    if bits == 8:
        return (pack_bytes if in_words else pack_b)(q, tile_n)
    return pack_nibbles(q.to(torch.int32) - low, tile_n)


def _pack_numbers(numbers: torch.Tensor, tile_n: int, less: int, dtype: str) -> torch.Tensor:
    return pack_b((numbers.float() - less).to(getattr(torch, dtype)), tile_n)


def _pack_same(like: torch.Tensor, tile_n: int, number: float) -> torch.Tensor:
    """Pack one number in the form that `like` would get."""
    return pack_b(torch.full(like.shape, number), tile_n)
