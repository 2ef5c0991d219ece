"""Layouts: where the element at a logical index lies in a buffer's memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.loops.index import Index, as_index, contiguous_strides, linear


@dataclass(frozen=True, slots=True)
class Strided:
    """Plain strides, in elements."""

    strides: tuple[int, ...]

    def offset(self, index: tuple[Index, ...]) -> Index:
        return linear(index, self.strides)

    def span(self, shape: tuple[int, ...]) -> int:
        return 1 + sum((n - 1) * s for n, s in zip(shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Blocked:
    """NCHW{block}c: dimension 1 in blocks of `block` channels that lie innermost; the last block is padded to full size.

    A tensor (N, C, *spatial) lies as (N, ceil(C / block), *spatial, block), row-major. What padding channels hold is undefined.
    Source: NeoCPU (Liu et al., USENIX ATC 2019).
    """

    block: int

    def physical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], -(-shape[1] // self.block), *shape[2:], self.block)

    def offset(self, index: tuple[Index, ...], shape: tuple[int, ...] = ()) -> Index:
        physical = self.physical_shape(shape)
        position = (index[0], index[1] // self.block, *index[2:], index[1] % self.block)
        return linear(position, contiguous_strides(physical))

    def span(self, shape: tuple[int, ...]) -> int:
        total = 1
        for size in self.physical_shape(shape):
            total *= size
        return total


Layout = Strided | Blocked


def contiguous(shape: tuple[int, ...]) -> Strided:
    """Row-major."""
    return Strided(contiguous_strides(shape))


def offset_of(layout: Layout, shape: tuple[int, ...], index: tuple[Index, ...]) -> Index:
    """The offset, in elements, of `index` in a buffer of logical shape `shape` laid out by `layout`."""
    if isinstance(layout, Blocked):
        return layout.offset(index, shape)
    return layout.offset(index) if index else as_index(0)
