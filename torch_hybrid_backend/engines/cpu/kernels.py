"""Kernels as the schedules of a processor want them: weights packed for its vectors, convolutions joined."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.dot_products import ROW_PARTS, DotProduct
from torch_hybrid_backend.loops.index import LoopVar
from torch_hybrid_backend.loops.ir import Buffer, Expr
from torch_hybrid_backend.loops.kernels import AttentionKernel, Kernel, Store
from torch_hybrid_backend.sizes.size import size_hint


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatMulKernel(Kernel):
    """Domain (b, m, n): accumulator[b, m, n] = sum over `k` of a * packed_b, then the stores read `accumulator`.

    `a` is over (b, m, k). `b` is packed ahead as (B or 1, ceil(N / tile_n), K, tile_n) in the argument `packed`, zero-padded.

    With a `dot`: K is in whole words, along which `a` is the load of what lies together; `packed` has a word's elements innermost, (B or 1,
    ceil(N / tile_n), K / group, tile_n, group); sums start at `start`, (B or 1, ceil(N / tile_n) * tile_n), if there is one.
    """

    k: LoopVar
    a: Expr
    packed: Buffer
    tile_n: int
    batched_b: bool
    accumulator: Buffer
    stores: tuple[Store, ...]
    dot: DotProduct | None = None
    start: Buffer | None = None

    @property
    def multiply_adds(self) -> float:
        return _points(self) * size_hint(self.k.extent)


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedMatMulKernel(Kernel):
    """Domain (b, m, n), one b: accumulator[0, m, n] = sum over `k` of a * w[n, k], then the stores read `accumulator`.

    `a` is over (b, m, k). w[n, k] is element `offset + n * row_stride + k * k_stride` of the argument `weight`, float32, which nothing has
    packed. One of the strides is 1.
    """

    k: LoopVar
    a: Expr
    weight: Buffer
    offset: int
    row_stride: int
    k_stride: int
    accumulator: Buffer
    stores: tuple[Store, ...]

    @property
    def multiply_adds(self) -> float:
        return _points(self) * size_hint(self.k.extent)


@dataclass(frozen=True, slots=True, eq=False)
class DequantizedMatMulKernel(Kernel):
    """Domain (b, m, n), one b: accumulator[0, m, n] = sum over `k` of a * (q[k, n] - zero[k // group, n]) * scale[k // group, n].

    `a` is over (b, m, k), float32. The q of a panel of `tile_n` columns lie in `packed`, of `bits` bits each: `packing.pack_b`, or, where
    `packed` is of int32, words along k (`packing.pack_bytes`, `packing.pack_nibbles`). `scales`, float32 or of a half type, and `zeros`,
    float32 or None where all are 0, are (1, ceil(N / tile_n), ceil(K / group), tile_n). `group` is a multiple of 8 where there are
    several and where `bits` is 4.

    With a `table`, 16 values of float32, an integer of 4 bits stands for the value at its place, modulo 16: scales are 1, zeros none.
    Where `a` is multiplied as integers, they have `row_parts` bytes: one or two where they may be rounded to 8 or 16 bits. Few rows have three
    where many have two.
    """

    k: LoopVar
    a: Expr
    packed: Buffer
    bits: int
    scales: Buffer
    zeros: Buffer | None
    group: int
    tile_n: int
    accumulator: Buffer
    stores: tuple[Store, ...]
    table: Buffer | None = None
    row_parts: int = ROW_PARTS

    @property
    def multiply_adds(self) -> float:
        return _points(self) * size_hint(self.k.extent)


@dataclass(frozen=True, slots=True, eq=False)
class TileDequantizedMatMulKernel(DequantizedMatMulKernel):
    """A `DequantizedMatMulKernel` with products on AMX's tiles, of known sizes, without a table.

    `format`: "float32", "float32 high", or that of the half type that `a` is rounded to already: "float16 split", or "bfloat16", for which the
    dequantised weight is rounded, too; "bfloat16" also where `row_parts` is 1. Several groups are of whole steps of k, 32, but for "bfloat16".
    """

    format: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TileMatMulKernel(Kernel):
    """Domain (b, m, n): accumulator[b, m, n] = sum over `k` of a * b by AMX, then the stores read `accumulator`. All sizes are known.

    `a` is over (b, m, k). `b`, of one batch unless `batched_b`, is packed ahead in the argument `packed` as the format of that name in
    `amx_formats.FORMATS` says; with `in_words` as for a `PackedMatMulKernel` with a `dot`, panels of 32 columns and whole steps of k. Sums of
    8-bit integers are int32, modulo 2^32.
    """

    k: LoopVar
    a: Expr
    packed: Buffer
    format: str
    batched_b: bool
    accumulator: Buffer
    stores: tuple[Store, ...]
    in_words: bool = False

    @property
    def multiply_adds(self) -> float:
        return _points(self) * size_hint(self.k.extent)


@dataclass(frozen=True, slots=True, eq=False)
class PackedConvKernel(Kernel):
    """Domain (n, o, *out_spatial): the accumulator, then the stores.

    `x` is over (n, c, *in_spatial) given by `x_vars`, in range only: the schedule handles padding. The weight argument `packed` is packed ahead
    by the engine, zero-padded. `winograd`: outputs along a side of a Winograd tile, for which the weight was transformed; 0 for a direct sum.

    With a `dot`: `x` is the load of what lies together along whole words of channels, and `packed` has a word's elements innermost. Sums start
    at `start`, one for each output channel, padded as they are in `packed`, if there is one. Of integers, what counts as nothing around the
    image is `border`: with a `dot` as it would lie in `x`, with words of taps in `packed` (`schedules/convolution/depthwise_vnni.py`) as the
    graph has it.
    """

    x_vars: tuple[LoopVar, ...]
    x: Expr
    packed: Buffer
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    kernel: tuple[int, ...]
    block: int  # output channels per block (vector lanes times vectors)
    accumulator: Buffer
    stores: tuple[Store, ...]
    winograd: int = 0
    dot: DotProduct | None = None
    start: Buffer | None = None
    border: int = 0

    @property
    def moves_pixels(self) -> bool:
        """True if pixels are multiplied as other numbers than they are, by the schedule of words of taps alone."""
        return self.dot is None and (self.start is not None or self.border != 0)

    @property
    def multiply_adds(self) -> float:
        return _points(self) * size_hint(self.x_vars[1].extent) / self.groups * math.prod(self.kernel)


@dataclass(frozen=True, slots=True, eq=False)
class TileConvKernel(Kernel):
    """Domain (n, o, *out_spatial): the accumulator by AMX, then the stores. All sizes are known; a group's channels are a multiple of 16
    where operands are float32, and at least 16 where there are several groups.

    `x` is over (n, c, *in_spatial) given by `x_vars`, in range only; around it lies `border`. The weight is packed ahead as a matrix of
    (kernel, c) by o for each group, in the format of that name in `amx_formats.FORMATS`, as `packing.pack_conv_tiles` says.
    """

    x_vars: tuple[LoopVar, ...]
    x: Expr
    packed: Buffer
    format: str
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    kernel: tuple[int, ...]
    accumulator: Buffer
    stores: tuple[Store, ...]
    border: int = 0

    @property
    def multiply_adds(self) -> float:
        return _points(self) * size_hint(self.x_vars[1].extent) / self.groups * math.prod(self.kernel)


@dataclass(frozen=True, slots=True, eq=False)
class FusedConvKernel(Kernel):
    """Convolutions one after the other: each reads what the one before it stores, which nothing else does and which lies in no memory.

    Each stage is a kernel of its own, with one store and, from the second on, an `x` that is one load; `domain` is that of the last.
    """

    stages: tuple[PackedConvKernel, ...]

    @property
    def multiply_adds(self) -> float:
        return sum(stage.multiply_adds for stage in self.stages)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bf16AttentionKernel(AttentionKernel):
    """Attention with products of bfloat16: q k^T is scaled, masked and made weights in float32, in which sums are, too.

    `format`: one of `amx_formats.FORMATS` for products on AMX's tiles, of known sizes; "" for dot products
    (`dot_products.bf16_dot_product`). Heads are of known size; `scale` is positive.

    Operands are bfloat16, with an even number of elements for each head of queries, and weights are rounded to bfloat16. In the formats of
    float32 operands and weights are float32, each split into several bfloat16.

    `weight_parts`: into how many bfloat16 float32 weights are split where operands of "bfloat16" are integers of 8 bits, which bfloat16 holds
    exactly.
    """

    format: str = ""
    weight_parts: int = 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Int8AttentionKernel(AttentionKernel):
    """Attention whose queries, int8 or uint8, and keys, int8, are multiplied as integers: q k^T is exact, then scaled in float32.

    `zero`: the queries' zero point; the scales of queries and keys are part of `scale`, which is positive. Values and weights are float32.
    Heads are of known size, a multiple of four. By vpdpbusd (`dot_products`).
    """

    zero: int = 0


def _points(kernel: Kernel) -> float:
    return math.prod(float(size_hint(variable.extent)) for variable in kernel.domain)
