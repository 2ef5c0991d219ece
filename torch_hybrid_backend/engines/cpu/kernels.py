"""Kernels as the schedules of a processor want them: weights packed for its vectors, convolutions joined."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from torch_hybrid_backend.engines.cpu.weights import AmxTiles, Panels, Weight
from torch_hybrid_backend.loops.index import LoopVar
from torch_hybrid_backend.loops.ir import Buffer, Expr
from torch_hybrid_backend.loops.kernels import Argument, AttentionKernel, Kernel, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import size_hint

Form = TypeVar("Form", bound=Weight)
Form_co = TypeVar("Form_co", bound=Weight, covariant=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CpuMatMulKernel(Kernel, Generic[Form_co]):
    """Domain (b, m, n): accumulator[b, m, n] = sum over `k` of a * b, then the stores read `accumulator`.

    `a` is over (b, m, k). b is `weight`: `Panels`, `InPlace`, `Quantized` or `AmxTiles`.
    """

    k: LoopVar
    a: Expr
    weight: Form_co
    accumulator: Buffer
    stores: tuple[Store, ...]

    @property
    def kind(self) -> str:
        return f"{self.weight.kind}_matmul"

    @property
    def is_batched(self) -> bool:
        """True if each matrix of a batch has a right operand of its own."""
        weight: Weight = self.weight
        if isinstance(weight, AmxTiles):
            return weight.is_batched
        return isinstance(weight, Panels) and weight.buffer.shape[0] != 1

    @property
    def multiply_adds(self) -> float:
        return _points(self) * size_hint(self.k.extent)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CpuConvKernel(Kernel, Generic[Form_co]):
    """Domain (n, o, *out_spatial): the accumulator, then the stores.

    `x` is over (n, c, *in_spatial) given by `x_vars`, in range only: the schedule handles padding. `weight`: `Panels`, `Winograd`, `Taps` or
    `AmxTiles`. `kernel`: the window's size.

    `border` is what counts as nothing around an image of integers. `Taps` have it as the graph has it, others as it would lie in `x`.

    On AMX's tiles all sizes are known. A group's channels are then a multiple of 16 where operands are float32, and at least 16 where there are
    several groups.
    """

    x_vars: tuple[LoopVar, ...]
    x: Expr
    weight: Form_co
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    kernel: tuple[int, ...]
    accumulator: Buffer
    stores: tuple[Store, ...]
    border: int = 0

    @property
    def kind(self) -> str:
        return f"{self.weight.kind}_conv"

    @property
    def multiply_adds(self) -> float:
        return _points(self) * size_hint(self.x_vars[1].extent) / self.groups * math.prod(self.kernel)


@dataclass(frozen=True, slots=True, eq=False)
class FusedConvKernel(Kernel):
    """Convolutions one after the other: each reads what the one before it stores, which nothing else does and which lies in no memory.

    Each stage is a kernel of its own, with one store and, from the second on, an `x` that is one load; `domain` is that of the last.
    """

    stages: tuple[CpuConvKernel[Panels], ...]

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


@overload
def with_weight(kernel: CpuMatMulKernel[Weight], weight: Form) -> CpuMatMulKernel[Form]: ...
@overload
def with_weight(kernel: CpuConvKernel[Weight], weight: Form) -> CpuConvKernel[Form]: ...
def with_weight(kernel: Any, weight: Weight) -> Any:
    """The kernel with another form of its weight, whose buffer takes the place of its own among the arguments."""
    own, buffer = kernel.weight.buffer, weight.buffer
    if buffer is own:
        return dataclasses.replace(kernel, weight=weight)
    argument = Argument(buffer, contiguous(buffer.shape))
    reads = tuple(argument if read.buffer is own else read for read in kernel.reads)
    return dataclasses.replace(kernel, reads=reads, weight=weight)


def _points(kernel: Kernel) -> float:
    return math.prod(float(size_hint(variable.extent)) for variable in kernel.domain)
