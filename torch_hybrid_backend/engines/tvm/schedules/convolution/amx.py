"""Convolution by AMX: the product of a matrix of pixels, (out_spatial, kernel positions times channels), by the weight's.

Pattern: a `TileConvKernel`. It is `matmul/amx.py`, where a row of A is one pixel of the result and k runs through the positions of the kernel,
and through the channels in each: the matrix, of which every part is made while it is copied to tiles, never lies in memory. Sixteen channels
of one pixel are one vector, which lies together in blocked and in channels-last tensors; a position outside of the image is sixteen zeros.
Source: Chellapilla, Puri & Simard, "High Performance Convolutional Neural Networks for Document Processing", 2006.
"""

from __future__ import annotations

import math

from tvm import tirx

from torch_hybrid_backend.engines.tvm.cpu.kernels import TileConvKernel
from torch_hybrid_backend.engines.tvm.schedules.matmul.amx import Piece, TileProduct
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.engines.tvm.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.sizes.size import known_int

_LANES = 16


def emit(kernel: TileConvKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The kernel's body."""
    return _TileConvolution(kernel, builder, printer, target).emit()


class _TileConvolution(TileProduct):
    """The emission of one kernel."""

    def __init__(self, kernel: TileConvKernel, builder: Builder, printer: Printer, target: Target) -> None:
        images, outputs, *spatial = (known_int(variable.extent) for variable in kernel.domain)
        # A row's place: images one after the other, so that a panel of rows may have pixels of two.
        self.places = (kernel.domain[0], *kernel.domain[2:])
        self.units = known_int(kernel.x_vars[1].extent) // _LANES
        depth = math.prod(kernel.kernel) * self.units * _LANES
        super().__init__(kernel, kernel.x, (1, images * math.prod(spatial), depth, outputs), builder, printer, target)
        self.conv = kernel

    def row(self, batch: Index, number: Index) -> tuple[dict[LoopVar, Index], list[Stmt]]:
        env: dict[LoopVar, Index] = {}
        bindings: list[Stmt] = []
        left = self.m
        for variable in self.places:
            size = known_int(variable.extent)
            left //= size
            # Bound, as every piece of the row asks for it.
            env[variable], binding = self.builder.bound(self.builder.index(number // left % size), size, "at")
            bindings.append(binding)
        return env, bindings

    def piece(self, env: dict[LoopVar, Index], unit: Index, within: int) -> Piece:
        conv, b = self.conv, self.builder
        position, block = unit // self.units, unit % self.units
        inside: list[TirExpr] = []
        own = {conv.x_vars[0]: env[conv.domain[0]]}
        left = math.prod(conv.kernel)
        geometry = zip(
            conv.x_vars[2:], conv.domain[2:], conv.kernel, conv.stride, conv.padding, conv.dilation, strict=True
        )
        for variable, out, kernel, stride, padding, dilation in geometry:
            left //= kernel
            size, reach = (
                known_int(variable.extent),
                (known_int(out.extent) - 1) * stride + (kernel - 1) * dilation - padding,
            )
            at = env[out] * stride + position // left % kernel * dilation - padding
            own[variable] = at
            if padding > 0:
                inside.append(b.index(at) >= 0)
            if reach >= size:
                inside.append(b.index(at) < size)
        condition = None
        for test in inside:
            condition = test if condition is None else tirx.And(condition, test)
        return condition, lambda lane: {**own, conv.x_vars[1]: block * _LANES + within + lane}
