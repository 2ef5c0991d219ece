"""Packing: how constant weights (and run-time right-hand sides) lie in memory for the matmul and convolution kernels.

Each packing exists twice, with one meaning: as a torch function for constants, run once ahead of time, and, for matmul, as a `Map` of the
loops language, so that a right-hand side known only at run time is packed by an ordinary kernel.
"""

from __future__ import annotations

import functools

import torch

from torch_hybrid_backend.engines.cpu.operands.amx_formats import LARGEST, PANEL, SMALLEST, TileFormat
from torch_hybrid_backend.engines.cpu.operands.winograd_transform import packed_winograd_shape, tile_size, weight_matrix
from torch_hybrid_backend.engines.cpu.tile_sizes import NIBBLES, nibble_place
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, Map, Value, compute_dtype
from torch_hybrid_backend.loops.kernels import Argument, MapKernel, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import Dim, ceil_div, known_int


def packed_b_shape(batch: Dim, n: Dim, k: Dim, tile_n: int) -> tuple[Dim, Dim, Dim, int]:
    """The shape of a packed right-hand side: (batch, ceil(n / tile_n), k, tile_n)."""
    return batch, ceil_div(n, tile_n), k, tile_n


def pack_b(b: torch.Tensor, tile_n: int) -> torch.Tensor:
    """Packs a matmul's right-hand side into panels of `tile_n` columns.

    b: (B, K, N), any strides.  Returns (B, ceil(N / tile_n), K, tile_n), contiguous, same dtype; columns beyond N are zero.
    """
    batch, k, n = b.shape
    tiles = -(-n // tile_n)
    packed = b.new_zeros((batch, tiles, k, tile_n))
    whole = n // tile_n
    packed[:, :whole] = b[:, :, : whole * tile_n].reshape(batch, k, whole, tile_n).transpose(1, 2)
    if whole < tiles:
        packed[:, whole, :, : n - whole * tile_n] = b[:, :, whole * tile_n :]
    return packed


def pack_nibbles(b: torch.Tensor, tile_n: int) -> torch.Tensor:
    """Packs a right-hand side of 4-bit integers, eight of a column to a word, as they follow along k.

    b: (1, K, N) of -8 .. 7, any integer dtype and strides, K a multiple of 8.  Returns (1, ceil(N / tile_n), K / 8, tile_n), int32, contiguous:
    q[k, n] is in bits 4 * nibble_place(k % 8) and up of word k // 8, in two's complement. Columns beyond N are zero.
    """
    _, k, n = b.shape
    words = torch.zeros((1, k // NIBBLES, n), dtype=torch.int32, device=b.device)
    for j in range(NIBBLES):
        words |= (b[:, j::NIBBLES].to(torch.int32) & 15) << (4 * nibble_place(j))
    return pack_b(words, tile_n)


def pack_bytes(b: torch.Tensor, tile_n: int) -> torch.Tensor:
    """Packs a right-hand side of int8, four of a column to a word, the first along k in the lowest bits.

    b: (1, K, N), any strides, K a multiple of 4.  Returns (1, ceil(N / tile_n), K / 4, tile_n), int32, contiguous. Columns beyond N are zero.
    """
    _, k, n = b.shape
    words = b.reshape(1, k // 4, 4, n).transpose(2, 3).contiguous().view(torch.int32).squeeze(3)
    return pack_b(words, tile_n)


def packed_b_value(b: Value, tile_n: int) -> Map:
    """`pack_b` as a value: (B, K, N) -> (B, ceil(N / tile_n), K, tile_n), zero beyond N."""
    batch, k, n = b.shape
    zero = ops.const(0, compute_dtype(b.dtype))

    def at(index: tuple[Index, ...]) -> Expr:
        batch_index, tile, row, lane = index
        column = tile * tile_n + lane
        inside = ops.index_in(column, 0, n)
        return ops.guard(inside, b.at((batch_index, row, column)), zero)

    return Map(packed_b_shape(batch, n, k, tile_n), b.dtype, at)


def pack_tiles(b: torch.Tensor, form: TileFormat) -> torch.Tensor:
    """Packs a matmul's right-hand side for AMX as `amx_formats` says.

    b: (B, K, N), any strides, of the format's operands.  Returns a vector of `form.packed_shape(B, K, N)`
    elements of `form.dtype`; k and columns beyond the last are zero.
    """
    batch, k, n = b.shape
    steps, panels, in_word = form.steps(k), -(-n // PANEL), 4 // form.itemsize
    dtype = torch.float32 if form.splits else b.dtype
    padded = b.new_zeros((batch, steps * form.depth, panels * PANEL), dtype=dtype)
    padded[:, :k, :n] = b

    def tiled(part: torch.Tensor) -> torch.Tensor:
        split = part.reshape(batch, steps, form.depth // in_word, in_word, panels, PANEL // 16, 16)
        return split.permute(0, 4, 1, 5, 2, 6, 3).reshape(batch * panels, steps, -1)

    if not form.splits:
        return tiled(padded).flatten()
    parts, rest = [], padded
    for _ in range(form.parts):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1]
    packed = torch.stack([tiled(part) for part in parts], 2).view(torch.int16)
    size = padded.abs()
    is_split = (size == 0) | ((size >= SMALLEST) & (size <= LARGEST))
    is_plain = ~is_split.reshape(batch, -1, panels, PANEL).all(3).all(1).flatten()
    if is_plain.any():
        bits = padded.view(torch.int32)
        for number, half in enumerate((bits >> 16, bits)):
            packed[is_plain, :, number] = tiled(half.to(torch.int16))[is_plain]
    return torch.cat((packed.flatten(), is_plain.to(torch.int16))).view(torch.bfloat16)


def pack_conv_tiles(
    w: torch.Tensor, form: TileFormat, channels: int | None = None, groups: int = 1, together: int = 1
) -> torch.Tensor:
    """`pack_tiles` of a convolution's weight (O, I, *kernel) as matrices (groups / together, `form.conv_depth(channels, kernel)`, O of each).

    `channels`: those of the image that a matrix reads, I * `together` where not said. k runs through the steps of
    `form.pixel_depth(channels)` elements, and for each of them through the kernel's positions: what is beyond the channels is zero. Of an image
    of few channels (`form.gathers`) it runs through the positions. `together`: groups of one matrix, which is zero where an output does not
    read a channel.
    """
    matrices, inputs = groups // together, w.shape[1]
    own = w.flatten(2).reshape(matrices, together, -1, inputs, w[0, 0].numel())
    outputs = own.shape[2]
    apart = own.new_zeros((matrices, together, outputs, together, inputs, own.shape[4]))
    for number in range(together):
        apart[:, number, :, number] = own[:, number]
    channels = channels or inputs * together
    depth = form.pixel_depth(channels)
    positions = apart.reshape(matrices, together * outputs, together * inputs, -1).permute(0, 3, 2, 1)
    positions = torch.nn.functional.pad(positions, (0, 0, 0, depth - together * inputs))
    if not form.gathers(channels):
        positions = positions.reshape(matrices, -1, depth // form.depth, form.depth, together * outputs).transpose(1, 2)
    return pack_tiles(positions.reshape(matrices, -1, together * outputs), form)


def is_depthwise(o: int, inputs_per_group: int, groups: int) -> bool:
    """True if every output channel reads exactly its own input channel."""
    return groups > 1 and inputs_per_group == 1 and o == groups


def packed_conv_shape(weight_shape: tuple[int, ...], groups: int, block: int) -> tuple[int, ...]:
    """The shape of a packed convolution weight; `weight_shape` is (O, I/groups, *kernel) with one or two kernel dimensions.

    Depthwise: (ceil(O / block), kh, kw, block).  Otherwise: (groups, ceil(O / groups / block), kh, I/groups, kw, block): in the order in which
    the kernel walks it, so that the weight streams through the cache. A 1-D kernel has kh = 1.
    """
    o, inputs, *kernel = weight_shape
    height, width = (1, kernel[0]) if len(kernel) == 1 else kernel
    if is_depthwise(o, inputs, groups):
        return -(-o // block), height, width, block
    return groups, -(-(o // groups) // block), height, inputs, width, block


def pack_conv_weight(w: torch.Tensor, groups: int, block: int) -> torch.Tensor:
    """Packs a convolution weight into blocks of `block` output channels.

    w: (O, I/groups, kw) or (O, I/groups, kh, kw), any strides.  Returns a contiguous tensor of `packed_conv_shape`, same dtype; output channels
    beyond the last are zero.
    """
    shape = packed_conv_shape(tuple(w.shape), groups, block)
    if w.dim() == 3:
        w = w.unsqueeze(2)
    o, inputs, height, width = w.shape
    if len(shape) == 4:
        padded = w.new_zeros((shape[0] * block, height, width))
        padded[:o] = w[:, 0]
        return padded.reshape(shape[0], block, height, width).permute(0, 2, 3, 1).contiguous()
    per_group, blocks = o // groups, shape[1]
    whole = per_group // block
    packed = w.new_empty(shape) if whole == blocks else w.new_zeros(shape)
    grouped = w.reshape(groups, per_group, inputs, height, width)
    full = grouped[:, : whole * block].reshape(groups, whole, block, inputs, height, width)
    packed[:, :whole] = full.permute(0, 1, 4, 3, 5, 2)
    if whole < blocks:
        packed[:, whole, ..., : per_group - whole * block] = grouped[:, whole * block :].permute(0, 3, 2, 4, 1)
    return packed


def packed_conv_weight_value(w: Value, groups: int, block: int) -> Map:
    """`pack_conv_weight` as a value, for weights only known at run time (training)."""
    outputs, inputs, *kernel = map(known_int, w.shape)
    shape = packed_conv_shape((outputs, inputs, *kernel), groups, block)
    per_group = outputs // groups
    zero = ops.const(0, compute_dtype(w.dtype))
    spatial = len(kernel)

    def at(index: tuple[Index, ...]) -> Expr:
        if is_depthwise(outputs, inputs, groups):
            (o_block, kh, kw, lane), group, channel = index, 0, 0
            within, limit = o_block * block + lane, outputs
        else:
            group_index, o_block, kh, channel_index, kw, lane = index
            group, channel = group_index * per_group, channel_index  # type: ignore[assignment]
            within, limit = o_block * block + lane, per_group
        position = (within + group, as_index(channel), *(kh, kw)[2 - spatial :])
        return ops.guard(ops.index_in(within, 0, limit), w.at(position), zero)

    return Map(shape, w.dtype, at)


def pack_winograd_weight(w: torch.Tensor, m: int, lanes: int, groups: int = 1) -> torch.Tensor:
    """Transforms the weight (O, I / groups, 3, 3) of a Winograd convolution, in float64, and packs it in the order of the kernel.

    Behind the positions are the signs of the nine taps, 1 more than each in two bits: what an infinite pixel is multiplied by.

    Returns a contiguous tensor of `packed_winograd_shape`, same dtype, float32 of a narrower one: transformed it has more digits. Output
    channels beyond a group's last are zero.
    """
    parts, panels, inputs, width = packed_winograd_shape(tuple(w.shape), m, lanes, groups)
    per_group, in_group = parts // groups, w.shape[0] // groups
    g = torch.tensor(
        [[float(value) for value in row] for row in weight_matrix(m)], dtype=torch.float64, device=w.device
    )
    both = torch.kron(g, g)  # (positions, 9): the transform of rows and of columns as one matrix product
    bits = 4.0 ** torch.arange(9, dtype=torch.float64, device=w.device)
    packed = w.new_zeros((parts, panels, inputs, width), dtype=torch.promote_types(w.dtype, torch.float32))
    for part in range(parts):  # part by part: the whole weight in float64 would be eight times its size
        group, number = divmod(part, per_group)
        rows = w[group * in_group : (group + 1) * in_group][number * width : (number + 1) * width]
        taps = rows.permute(2, 3, 1, 0).reshape(9, -1).double()
        packed[part, :-1, :, : rows.shape[0]] = (both @ taps).reshape(panels - 1, inputs, rows.shape[0])
        packed[part, -1, :, : rows.shape[0]] = (bits @ (taps.sign() + 1)).reshape(inputs, rows.shape[0])
    return packed


def winograd_weight_kernel(panels: Buffer, transformed: Buffer, m: int) -> MapKernel:
    """`pack_winograd_weight` as a kernel, in float32, for weights only known at run time (training).

    panels: (1, blocks, 3, I, 3, block), a weight as `packed_conv_weight_value` packs it in each call. transformed: a buffer of
    `packed_winograd_shape`, whose width is one block or two.
    """
    _, blocks, _, inputs, _, block = map(known_int, panels.shape)
    parts, positions, _, width = map(known_int, transformed.shape)
    matrix, n = weight_matrix(m), tile_size(m)
    variables = (
        LoopVar("part", parts),
        LoopVar("position", positions),
        LoopVar("input", inputs),
        LoopVar("half", width // block),
        LoopVar("lane", block),
    )
    part, position, channel, half, lane = map(index_of, variables)
    number = part * (width // block) + half
    zero = ops.const(0, "float32")

    def tap(a: int, b: int) -> Expr:
        load = Load(compute_dtype(panels.dtype), panels, (as_index(0), number, as_index(a), channel, as_index(b), lane))
        return ops.guard(ops.index_in(number, 0, blocks), load, zero)

    def factor(line: Index, tap: int) -> Expr:
        """The matrix's element in a line that is known in the loop over positions alone: the loops within keep it in a register."""
        found = ops.const(float(matrix[-1][tap]), "float32")
        for k in range(n - 1):
            is_here = ops.call("eq", ops.from_index(line), ops.from_index(k))
            found = ops.where(is_here, ops.const(float(matrix[k][tap]), "float32"), found)
        return found

    def summed(values: list[Expr]) -> Expr:
        return functools.reduce(ops.add, values)

    rows = [summed([ops.mul(factor(position % n, b), tap(a, b)) for b in range(3)]) for a in range(3)]
    product = summed([ops.mul(factor(position // n, a), row) for a, row in enumerate(rows)])
    signs = []
    for number_of_tap in range(9):
        value = tap(*divmod(number_of_tap, 3))
        bits = [ops.const(float(sign * 4**number_of_tap), "float32") for sign in (0, 1, 2)]
        is_negative, is_positive = ops.call("lt", value, zero), ops.call("gt", value, zero)
        signs.append(ops.where(is_negative, bits[0], ops.where(is_positive, bits[2], bits[1])))
    value = ops.guard(ops.index_in(position, 0, n * n), product, summed(signs))
    return MapKernel(
        reads=(Argument(panels, contiguous(panels.shape)),),
        writes=(Argument(transformed, contiguous(transformed.shape)),),
        domain=variables,
        stores=(Store(transformed, (part, position, channel, half * block + lane), value),),
    )
