"""Packing of operands of dot products (`dot_products.py`) in words of 32 bits (VNNI layout).

Each packing exists twice, with one meaning, as those in `packing` do: as a torch function for constants, and as a `Map` for what calls compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_hybrid_backend.engines.cpu.dot_products import DotProduct
from torch_hybrid_backend.engines.cpu.operands.packing import (
    pack_b,
    pack_conv_weight,
    packed_b_shape,
    packed_conv_weight_value,
)
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Expr, Map, Value, compute_dtype
from torch_hybrid_backend.sizes.size import Dim, ceil_div

# Neighbouring taps of a depthwise convolution in one word.
TAPS = 4


def words(k: Dim, group: int) -> Dim:
    """The number of words that `k` elements take."""
    return ceil_div(k, group)


def left_words(a: Value, dot: DotProduct) -> Map:
    """A product's left operand (B, M, K) as words: (B, M, ceil(K / group) * group) of `dot.left`, moved, zeros beyond K."""
    batch, m, k = a.shape
    padded = words(k, dot.group) * dot.group
    zero = ops.const(0, compute_dtype(dot.left))

    def at(index: tuple[Index, ...]) -> Expr:
        element = _moved(a.at(index), dot)
        return element if padded == k else ops.guard(ops.index_in(index[2], 0, k), element, zero)

    parents = ((a, lambda index: index),) if padded == k else ()
    return Map((batch, m, padded), dot.left, at, parents)


def constant_words(a: torch.Tensor, dot: DotProduct) -> torch.Tensor:
    """`left_words` of a constant."""
    moved = a.to(torch.int32) + dot.shift if dot.shift else a
    return torch.nn.functional.pad(moved.to(getattr(torch, dot.left)), (0, -a.shape[2] % dot.group)).contiguous()


def _converted(e: Expr, dtype: str) -> Expr:
    return ops.cast(e, compute_dtype(dtype))


def _moved(e: Expr, dot: DotProduct) -> Expr:
    """An element of a left operand as it lies in words."""
    if not dot.shift:
        return _converted(e, dot.left)
    return ops.cast(ops.add(ops.cast(e, "int32"), ops.const(dot.shift, "int32")), dot.left)


def image_words(x: Value, dot: DotProduct) -> Map:
    """A convolution's input (N, C, *spatial) as `dot.left`, moved, C padded to whole words."""
    images, channels, *spatial = x.shape
    whole = words(channels, dot.group) * dot.group
    shape = (images, whole, *spatial)

    def at(index: tuple[Index, ...]) -> Expr:
        value = _moved(x.at(index), dot)
        if whole != channels:
            value = ops.guard(ops.index_in(index[1], 0, channels), value, ops.const(0, compute_dtype(dot.left)))
        return value

    return Map(shape, dot.left, at, ((x, lambda index: index),) if shape == x.shape else ())


def packed_words_shape(batch: Dim, n: Dim, k: Dim, tile_n: int, group: int) -> tuple[Dim, Dim, Dim, int, int]:
    """The shape of a right operand in words: (batch, ceil(n / tile_n), ceil(k / group), tile_n, group)."""
    panels = packed_b_shape(batch, n, words(k, group), tile_n)
    return (*panels, group)


def pack_right(b: torch.Tensor, tile_n: int, dot: DotProduct) -> torch.Tensor:
    """Packs a product's right operand (B, K, N) as `packed_words_shape` says, in `dot.right`; elements beyond K and N are zero."""
    batch, k, n = b.shape
    count = -(-k // dot.group)
    whole = torch.nn.functional.pad(b.to(getattr(torch, dot.right)), (0, 0, 0, count * dot.group - k))
    # (B, words, group, N) -> words as rows, N * group columns.
    rows = whole.reshape(batch, count, dot.group, n).transpose(2, 3).reshape(batch, count, n * dot.group)
    return pack_b(rows, tile_n * dot.group).reshape(batch, -1, count, tile_n, dot.group)


def packed_right_value(b: Value, tile_n: int, dot: DotProduct) -> Map:
    """`pack_right` as a value."""
    batch, k, n = b.shape
    zero = ops.const(0, compute_dtype(dot.right))

    def at(index: tuple[Index, ...]) -> Expr:
        batch_index, tile, word, lane, element = index
        row, column = word * dot.group + element, tile * tile_n + lane
        inside = ops.call("and", ops.index_in(row, 0, k), ops.index_in(column, 0, n))
        return ops.guard(inside, _converted(b.at((batch_index, row, column)), dot.right), zero)

    return Map(packed_words_shape(batch, n, k, tile_n, dot.group), dot.right, at)


def column_sums(b: torch.Tensor, width: int, factor: int) -> torch.Tensor:
    """The first values of columns' sums: (B, ceil(N / width) * width) int32, `factor` times the sums of the columns of b (B, K, N), 0 beyond
    N."""
    sums = b.sum(dim=1, dtype=torch.int64) * factor
    return torch.nn.functional.pad(sums, (0, -b.shape[2] % width)).to(torch.int32)


def pack_conv_words(w: torch.Tensor, groups: int, block: int, dot: DotProduct) -> torch.Tensor:
    """Packs a convolution weight (O, I / groups, *kernel) as `packing.pack_conv_weight` does, words of input channels in the place of channels:
    (groups, ceil(O / groups / block), kh, ceil(I / groups / group), kw, block, group), in `dot.right`, zero-padded."""
    spatial = [0, 0] * (w.dim() - 2)
    whole = torch.nn.functional.pad(w.to(getattr(torch, dot.right)), [*spatial, 0, -w.shape[1] % dot.group])
    elements = [pack_conv_weight(whole[:, element :: dot.group], groups, block) for element in range(dot.group)]
    return torch.stack(elements, dim=-1)


def packed_conv_words_value(w: Value, groups: int, block: int, dot: DotProduct) -> Map:
    """`pack_conv_words` as a value."""
    outputs, inputs, *kernel = w.shape
    zero = ops.const(0, compute_dtype(dot.right))

    def element(number: Index | int) -> Map:
        def at(index: tuple[Index, ...]) -> Expr:
            output, word, *tap = index
            channel = word * dot.group + number
            return ops.guard(
                ops.index_in(channel, 0, inputs), _converted(w.at((output, channel, *tap)), dot.right), zero
            )

        part = Map((outputs, words(inputs, dot.group), *kernel), dot.right, at)
        return packed_conv_weight_value(part, groups, block)

    return Map((*element(0).shape, dot.group), dot.right, lambda index: element(index[-1]).at(index[:-1]))


def channel_sums(w: torch.Tensor, groups: int, block: int, factor: int) -> torch.Tensor:
    """The first values of the sums of output channels: int32, `factor` times the sum of its weights, each group padded to whole blocks."""
    sums = w.flatten(1).sum(dim=1, dtype=torch.int64).reshape(groups, -1) * factor
    return torch.nn.functional.pad(sums, (0, -sums.shape[1] % block)).to(torch.int32).flatten()


def tap_words_shape(weight_shape: Sequence[int], block: int) -> tuple[int, int, int, int, int]:
    """The shape of a depthwise weight (C, 1, *kernel) in words of taps: (ceil(C / block), kh, ceil(kw / 4), block, 4)."""
    channels, _, *kernel = weight_shape
    height, width = (1, *kernel)[-2:]
    return -(-channels // block), height, -(-width // TAPS), block, TAPS


def pack_taps(w: torch.Tensor, block: int) -> torch.Tensor:
    """Packs a depthwise weight (C, 1, *kernel), int8, as `tap_words_shape` says: a word has neighbours of a line; zero-padded."""
    blocks, height, groups, _, _ = shape = tap_words_shape(w.shape, block)
    lines = w.reshape(w.shape[0], height, w.shape[-1])
    beyond = (0, groups * TAPS - w.shape[-1], 0, 0, 0, blocks * block - w.shape[0])
    padded = torch.nn.functional.pad(lines, beyond).reshape(blocks, block, height, groups, TAPS)
    return padded.permute(0, 2, 3, 1, 4).contiguous().reshape(shape)
