"""Operations whose operands are packed for the schedules of a processor: they say which by their class."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.codegen.operands import StridedView
from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.loops.ir import Buffer, ConvOp, MatMulOp


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatMulOp(MatMulOp):
    """A matmul whose `b` is packed in panels of `tile_n` columns (`packing.pack_b`).

    With a `dot`: `a` is what words are read from, (B, M, words * group), `b` is packed in words, and sums start at `start`.
    """

    b: Buffer
    tile_n: int
    dot: DotProduct | None = None
    start: Buffer | None = None

    def reads(self) -> list[Buffer]:
        return [*MatMulOp.reads(self), *([] if self.start is None else [self.start])]


@dataclass(frozen=True, slots=True, eq=False)
class DequantizedMatMulOp(MatMulOp):
    """A matmul, one b, whose `b` is packed as `kernels.DequantizedMatMulKernel` says, which the other fields are of too."""

    b: Buffer
    bits: int
    scales: Buffer
    zeros: Buffer | None
    group: int
    tile_n: int
    table: Buffer | None = None

    def reads(self) -> list[Buffer]:
        return [*MatMulOp.reads(self), *self.beside]

    @property
    def beside(self) -> list[Buffer]:
        """Buffers that are read of the weight beside its integers."""
        return [self.scales, *(buffer for buffer in (self.zeros, self.table) if buffer is not None)]


@dataclass(frozen=True, slots=True, eq=False)
class UnpackedMatMulOp(MatMulOp):
    """A matmul whose right operand, (1, k, n), is read where it lies: as the view `weight` of memory."""

    weight: StridedView


@dataclass(frozen=True, slots=True, eq=False)
class PackedConvOp(ConvOp):
    """A convolution whose `w` is packed in blocks of `block` output channels (`packing.pack_conv_weight`). `kernel`: its sizes before.

    With a `dot`: `x` has whole words of channels in each group, and `w` is packed in words. Integers' sums start at `start`, and what counts as
    nothing around the image is `border`.
    """

    w: Buffer
    block: int
    kernel: tuple[int, ...]
    dot: DotProduct | None = None
    start: Buffer | None = None
    border: int = 0

    def reads(self) -> list[Buffer]:
        return [*ConvOp.reads(self), *([] if self.start is None else [self.start])]
