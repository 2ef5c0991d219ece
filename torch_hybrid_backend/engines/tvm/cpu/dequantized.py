"""Right operands of products that are dequantised weights: recognised by what they compute, and packed for kernels that unpack them.

    b[k, n] = (q[k, n] - zero[k // group, n]) * scale[k // group, n]          q of 8 bits, or of 8 bits of which 4 matter

No form of the weight in float32 is ever made: what is packed ahead has 8 or 4 bits an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from torch_hybrid_backend.codegen.operands import OperandPacker, strided_view
from torch_hybrid_backend.engines.tvm.cpu.operations import DequantizedMatMulOp
from torch_hybrid_backend.engines.tvm.cpu.packing import NIBBLES, pack_b, pack_nibbles, packed_b_shape
from torch_hybrid_backend.engines.tvm.cpu.tiles import tile_n
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar
from torch_hybrid_backend.loops.integer_products import affine
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, Load, Map, MatMulOp, compute_dtype, domain_vars


def dequantized_operand(op: MatMulOp, packer: OperandPacker, target: Target) -> DequantizedMatMulOp | None:
    """The product with its dequantised weight packed; None where its right operand is none, or kernels do not take it.

    They take whole groups, one matrix of known sizes and more columns than a vector has lanes; of 4 bits, groups of whole words.
    """
    _, k, n = op.b.shape
    if op.a.shape[0] != 1 or op.b.shape[0] != 1 or not isinstance(k, int) or not isinstance(n, int):
        return None
    if isinstance(op.b, Buffer) or n <= target.lanes or target.lanes < 8:
        return None
    if {compute_dtype(op.a.dtype), compute_dtype(op.out.dtype)} != {"float32"}:
        return None
    index = domain_vars(op.b.shape, "w")
    weight = _Weight.of(op.b.at(index))
    if weight is None:
        return None
    groups = {_group(of_group, index[1], k) for of_group in weight.of_groups}
    group = groups.pop()
    if groups or group is None or k % group:
        return None
    bits = 4 if weight.fits_nibbles and group % NIBBLES == 0 else 8
    if bits == 8 and group != k and group % NIBBLES:
        return None

    def part(of: Callable[[_Weight], Load | None], step: int, dtype: str) -> Map:
        """A part of the weight as a value, for every `step`-th k."""

        def at(place: tuple[Index, ...]) -> Expr:
            found = _Weight.of(op.b.at((place[0], place[1] * step, place[2])))
            load = None if found is None else of(found)
            assert load is not None
            return load

        return Map((1, k // step, n), dtype, at)

    tile = tile_n(n, target)
    low = weight.bounds[0] + 8 if bits == 4 else 0  # what is taken off integers, so that they lie in -8 .. 7
    integers = part(lambda w: w.integers, 1, weight.integers.buffer.dtype)
    scales = part(lambda w: w.scale, group, weight.scale.buffer.dtype)
    zeros = None if weight.zero is None and low == 0 else scales
    if weight.zero is not None:
        zeros = part(lambda w: w.zero, group, weight.zero.buffer.dtype)
    views = [strided_view(value) for value in (integers, scales, *([] if zeros is None else [zeros]))]
    if any(view is None or not view.is_static for view in views):
        return None

    rows = k // NIBBLES if bits == 4 else k
    q_dtype = "int32" if bits == 4 else integers.dtype
    pack_q = partial(_pack_integers, tile_n=tile, bounds=weight.bounds) if bits == 4 else partial(pack_b, tile_n=tile)
    pack_z = partial(_pack_zeros, tile_n=tile, low=low, is_given=weight.zero is not None)

    def packed(value: Map, ahead: Callable[[torch.Tensor], torch.Tensor], rows: int, dtype: str, how: object) -> Buffer:
        form = packed_b_shape(1, n, rows, tile)
        return packer.pack(value, ahead, lambda _: Map(form, dtype, value.fn), (how, tile))

    return DequantizedMatMulOp(
        op.out,
        op.a,
        packed(integers, pack_q, rows, q_dtype, ("integers", bits, weight.bounds)),
        bits,
        packed(scales, partial(_pack_scales, tile_n=tile), k // group, "float32", "scales"),
        None
        if zeros is None
        else packed(zeros, pack_z, k // group, "float32", ("zeros", low, weight.zero is not None)),
        group,
        tile,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """An element of a dequantised weight: what it is read from. `bounds`: between which integers lie."""

    integers: Load
    bounds: tuple[int, int]
    scale: Load
    zero: Load | None

    @property
    def fits_nibbles(self) -> bool:
        return self.bounds[1] - self.bounds[0] < 16

    @property
    def of_groups(self) -> tuple[Load, ...]:
        return (self.scale,) if self.zero is None else (self.scale, self.zero)

    @staticmethod
    def of(e: Expr) -> _Weight | None:
        """None where an expression is not of this form, or one of its parts is not simply read from a constant."""
        found = affine(e)
        if found is None or len(found.scales) != 1:
            return None
        integers, bounds = _bounded(found.integer)
        scale = _read(found.scales[0])
        zero = None if found.zero is None else _read(found.zero)
        if not isinstance(integers, Load) or scale is None or scale.dtype != "float32":
            return None
        if found.zero is not None and zero is None:
            return None
        if not all(load.buffer.constant for load in (integers, scale, *([] if zero is None else [zero]))):
            return None
        return _Weight(integers, bounds, scale, zero)


def _bounded(e: Expr) -> tuple[Expr, tuple[int, int]]:
    """What an integer of 8 bits is read from, seen through a clamp, and its bounds."""
    low, high = (0, 255) if e.dtype == "uint8" else (-128, 127)
    while isinstance(e, Call) and e.op in ("max", "min") and isinstance(e.args[1], Const):
        bound = int(e.args[1].value)
        low, high = (max(low, bound), high) if e.op == "max" else (low, min(high, bound))
        e = e.args[0]
    return e, (low, high)


def _read(e: Expr | None) -> Load | None:
    """What is read to be cast."""
    while isinstance(e, Call) and e.op == "cast":
        e = e.args[0]
    return e if isinstance(e, Load) else None


def _group(load: Load, k: Index, extent: int) -> int | None:
    """How many neighbours along k read the same element; None where they do not form groups that lie one after the other."""
    variables, sizes = {atom for atom, _ in k.terms}, set()
    for index in load.index:
        for atom, _ in index.terms:
            if isinstance(atom, FloorDiv) and atom.numerator == k and isinstance(atom.divisor, int):
                sizes.add(atom.divisor)
            elif not isinstance(atom, LoopVar) or atom in variables:
                return None
    return extent if not sizes else sizes.pop() if len(sizes) == 1 else None


def _pack_integers(q: torch.Tensor, tile_n: int, bounds: tuple[int, int]) -> torch.Tensor:
    """Integers within bounds 15 apart or less, as nibbles."""
    return pack_nibbles(q.to(torch.int32).clamp(*bounds) - (bounds[0] + 8), tile_n)


def _pack_scales(scales: torch.Tensor, tile_n: int) -> torch.Tensor:
    return pack_b(scales.float(), tile_n)


def _pack_zeros(zeros: torch.Tensor, tile_n: int, low: int, is_given: bool) -> torch.Tensor:
    """Zero points of integers that are less by `low`; where none are given, 0 is what they are of, and `zeros` has their form."""
    return pack_b((zeros.float() if is_given else torch.zeros(zeros.shape)) - low, tile_n)
