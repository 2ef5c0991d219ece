"""The windows of a convolution: where in the image their taps lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.loops.ir import Const, Expr
from torch_hybrid_backend.loops.kernels import ConvKernel
from torch_hybrid_backend.loops.ops import index_in


def window(
    kernel: ConvKernel, points: Mapping[LoopVar, Index], env: Mapping[LoopVar, Index], taps: Sequence[LoopVar]
) -> tuple[list[Index], list[Expr]]:
    """The place of a tap along each spatial dimension, and what has to hold for it to be in the image.

    points: the loop variables of the result's domain; env: the `taps`, one for each spatial dimension.
    """
    place = [
        points[v] * stride - padding + env[tap] * dilation
        for v, tap, stride, padding, dilation in zip(
            kernel.domain[2:], taps, kernel.stride, kernel.padding, kernel.dilation, strict=True
        )
    ]
    tests = [index_in(index, 0, v.extent) for index, v in zip(place, kernel.x_vars[2:], strict=True)]
    return place, [test for test in tests if not isinstance(test, Const)]
