"""Operations with their weights as the schedules of a processor read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.weights import InPlace, Panels, Quantized, Taps
from torch_hybrid_backend.loops.ir import Buffer, ConvOp, MatMulOp, Value, buffers_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CpuMatMulOp(MatMulOp):
    """A matmul that reads `weight` for `b`. With `Panels` that have a `dot`, `a` is what words are read from, (B, M, words * group)."""

    weight: Panels | InPlace | Quantized

    def reads(self) -> list[Buffer]:
        return list(dict.fromkeys([*buffers_of(self.a), *self.weight.reads]))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CpuConvOp(ConvOp):
    """A convolution that reads `weight` for `w`. With `Panels` that have a `dot`, `x` has whole words of channels in each group.

    `border`: what counts as nothing around an image of integers.
    """

    weight: Panels | Taps
    border: int = 0

    def reads(self) -> list[Buffer]:
        return list(dict.fromkeys([*buffers_of(self.x), *self.weight.reads]))


def convolution_with(
    op: ConvOp, weight: Panels | Taps, *, out: Buffer | None = None, x: Value | None = None, border: int = 0
) -> CpuConvOp:
    """The convolution with its weight in another form, and with `out` and `x` in place of its own where they are given."""
    return CpuConvOp(
        op.out if out is None else out,
        op.x if x is None else x,
        op.w,
        op.stride,
        op.padding,
        op.dilation,
        op.groups,
        weight=weight,
        border=border,
    )
