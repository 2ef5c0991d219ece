"""Layouts: maps from a logical index to the place in a buffer's memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.loops.index import Index, as_index, contiguous_strides, linear
from torch_hybrid_backend.sizes.size import Dim, ceil_div, product


@dataclass(frozen=True, slots=True)
class Strided:
    """Plain strides, in elements."""

    strides: tuple[Dim, ...]

    def offset(self, index: tuple[Index, ...]) -> Index:
        return linear(index, self.strides)

    def span(self, shape: tuple[Dim, ...]) -> Dim:
        total: Dim = 1
        for size, stride in zip(shape, self.strides, strict=True):
            total = total + (size - 1) * stride
        return total


@dataclass(frozen=True, slots=True)
class Blocked:
    """NCHW{block}c: dimension 1 in blocks of `block` channels that lie innermost; the last block is padded to full size.

    A tensor (N, C, *spatial) lies as (N, ceil(C / block), *spatial, block), row-major. What padding channels hold is undefined.
    Source: NeoCPU (Liu et al., USENIX ATC 2019).
    """

    block: int

    def physical_shape(self, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return (shape[0], ceil_div(shape[1], self.block), *shape[2:], self.block)

    def offset(self, index: tuple[Index, ...], shape: tuple[Dim, ...] = ()) -> Index:
        physical = self.physical_shape(shape)
        position = (index[0], index[1] // self.block, *index[2:], index[1] % self.block)
        return linear(position, contiguous_strides(physical))

    def span(self, shape: tuple[Dim, ...]) -> Dim:
        return product(self.physical_shape(shape))


Layout = Strided | Blocked


def contiguous(shape: tuple[Dim, ...]) -> Strided:
    """Row-major."""
    return Strided(contiguous_strides(shape))


def offset_of(layout: Layout, shape: tuple[Dim, ...], index: tuple[Index, ...]) -> Index:
    """The offset, in elements, of `index` in a buffer of logical shape `shape` laid out by `layout`."""
    if isinstance(layout, Blocked):
        return layout.offset(index, shape)
    return layout.offset(index) if index else as_index(0)
