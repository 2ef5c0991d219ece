"""Tables of quantized embeddings, packed: 4 bits stay 4 bits in memory, and a layer's weight is the table of the embedding tied to it.

    table[n, k] = q[n, k] * scale[n, k // group]        n read from memory

Kernels read an embedding's rows where they need them. The integers of a table that no product reads are packed row by row. Those of a tied
one are read from where the product has them packed, panels of columns, its scales too: one copy serves both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch_hybrid_backend.codegen.operands import OperandPacker, strided_view
from torch_hybrid_backend.engines.cpu.operands.packing import packed_b_shape
from torch_hybrid_backend.engines.cpu.operands.quantized import dequantized_operand, pack_integers
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tile_sizes import NIBBLES
from torch_hybrid_backend.engines.cpu.weights import Quantized
from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import (
    Buffer,
    Call,
    Expr,
    Load,
    LoopOp,
    Map,
    MapOp,
    MatMulOp,
    ReduceOp,
    ScanOp,
    Value,
    domain_vars,
    post_order,
)
from torch_hybrid_backend.loops.ops import add, call, cast, from_index, literal, sub
from torch_hybrid_backend.loops.quantized import NARROW, bounded, is_gathered


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A matrix (N, K) in panels of `width` columns n, as `packed_b_shape` has them. `bits`: of an element in a word of 32 bits, in two's
    complement and less `low`; None: elements lie one by one."""

    buffer: Buffer
    width: int
    bits: int | None = None
    low: int = 0

    def at(self, n: Index, k: Index, dtype: str) -> Expr:
        """The element of row n."""
        tile, lane = n // self.width, n % self.width
        if self.bits is None:
            return cast(self.buffer.at((as_index(0), tile, k, lane)), dtype)
        in_word = 32 // self.bits
        word = self.buffer.at((as_index(0), tile, k // in_word, lane))
        place = k % in_word
        if self.bits == 4:  # `tile_sizes.nibble_place`
            place = place % 4 * 2 + place // 4
        sign = 1 << (self.bits - 1)
        bits = call("bitand", call("shr", word, from_index(place * self.bits, "int32")), literal(2 * sign - 1, "int32"))
        number = sub(call("bitxor", bits, literal(sign, "int32")), literal(sign, "int32"))
        return cast(add(number, literal(self.low, "int32")) if self.low else number, dtype)


class PackedTables:
    """The tables of a graph's embeddings. `packer` packs them, as it packs the weights of products."""

    def __init__(self, graph: LoopGraph, packer: OperandPacker, target: Target) -> None:
        self._packer = packer
        self._tied: dict[tuple[Buffer, tuple[int, int] | None], _Packed] = {}
        for op in graph.ops:
            if isinstance(op, MatMulOp) and op.quantized is not None and op.quantized.table is None:
                product = dequantized_operand(op, packer, target)
                if product is not None and isinstance(product.weight, Quantized):
                    self._tie(op, product.weight)

    def reading(self, op: LoopOp) -> LoopOp:
        """The operation with rows of tables read from packed ones."""
        match op:
            case MapOp() if self._reads_table(op.value.at(domain_vars(op.value.shape))):
                value = op.value
                same = ((value, lambda index: index),)
                return replace(
                    op, value=Map(value.shape, value.dtype, lambda index: self._packed(value.at(index)), same)
                )
            case ReduceOp() if self._reads_table(op.body(domain_vars(op.domain))):
                return replace(op, body=partial(self._body, op))
            case ScanOp() if self._reads_table(op.body(domain_vars(op.out.shape))):
                return replace(op, body=partial(self._body, op))
        return op

    def _body(self, op: ReduceOp | ScanOp, index: tuple[Index, ...]) -> Expr:
        return self._packed(op.body(index))

    def _reads_table(self, expr: Expr) -> bool:
        return any(self._table_of(e) is not None for e in post_order(expr))

    def _packed(self, expr: Expr) -> Expr:
        done: dict[Expr, Expr] = {}
        for e in post_order(expr):
            table = self._table_of(e)
            if table is not None:
                packed, load = table
                n, *rest = load.index
                done[e] = packed.at(n, rest[0] if rest else as_index(0), e.dtype)
            else:
                done[e] = e.with_args(done[a] for a in e.args) if isinstance(e, Call) else e
        return done[expr]

    def _table_of(self, e: Expr) -> tuple[_Packed, Load] | None:
        """The packed table that a scalar is an element of, and the element of the table as it was; None for others."""
        load, bounds = bounded(e) if e.dtype in NARROW else (e, None)
        if not isinstance(load, Load) or not load.buffer.constant or not is_gathered(load):
            return None
        if (tied := self._tied.get((load.buffer, bounds))) is not None:
            return tied, load
        table = None if bounds is None else self._packed_by_rows(load.buffer, bounds)
        return None if table is None else (table, load)

    def _packed_by_rows(self, table: Buffer, bounds: tuple[int, int]) -> _Packed | None:
        """A table of 4 bits; None for those of others, whose memory is as small already."""
        if bounds[1] - bounds[0] >= 16 or len(table.shape) != 2:
            return None
        rows, depth = table.shape
        if not isinstance(rows, int) or not isinstance(depth, int) or depth % NIBBLES:
            return None
        low = bounds[0] + 8

        def clamped(index: tuple[Index, ...]) -> Expr:
            inside = call("max", table.at((index[2], index[1])), literal(bounds[0], table.dtype))
            return call("min", inside, literal(bounds[1], table.dtype))

        def unused(value: Value) -> Map:
            return Map(packed_b_shape(1, rows, depth // NIBBLES, 1), "int32", value.at)

        ahead = partial(pack_integers, tile_n=1, bits=4, low=low, in_words=True)
        buffer = self._packer.pack(Map((1, depth, rows), table.dtype, clamped), ahead, unused, ("table", low))
        return _Packed(buffer, 1, 4, low)

    def _tie(self, op: MatMulOp, weight: Quantized) -> None:
        """Note where a product has its integers and scales packed, for embeddings that read them too."""
        assert op.quantized is not None
        integers = op.quantized.integers
        if (table := _rows_of(integers)) is None:
            return
        bounds = op.quantized.bounds
        bits = weight.bits if weight.buffer.dtype == "int32" else None
        self._tied[table, bounds] = _Packed(weight.buffer, weight.width, bits, bounds[0] + 8 if bits == 4 else 0)
        scales = op.quantized.scales
        if isinstance(scales, Value) and (numbers := _rows_of(scales)) is not None:
            self._tied[numbers, None] = _Packed(weight.scales, weight.width)


def _rows_of(operand: Value) -> Buffer | None:
    """The constant (N, K), or (N,) where K is 1, that an operand (1, K, N) is the transpose of, as a whole; None where it is none."""
    view = strided_view(operand)
    if view is None or not view.is_constant or view.offset != 0:
        return None
    _, k, n = view.shape
    if view.buffer.shape not in ((n, k), *(((n,),) if k == 1 else ())):
        return None
    return view.buffer if view.strides[2] == k and (k == 1 or view.strides[1] == 1) else None
