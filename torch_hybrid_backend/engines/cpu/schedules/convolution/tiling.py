"""The tiling of a direct convolution: what one register tile computes, by counting; see `direct_convolution`."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.schedules.axes import offsets_of, step
from torch_hybrid_backend.engines.cpu.schedules.convolution.geometry import Axis, is_wide
from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.schedules.convolution.weight_stream import streams
from torch_hybrid_backend.engines.cpu.schedules.register_tiles import IN_FLIGHT, lanes_of
from torch_hybrid_backend.engines.cpu.tile_sizes import MAX_ROWS, Split, max_rows, split_into
from torch_hybrid_backend.loops.index import Index, LoopVar
from torch_hybrid_backend.loops.ir import loads_of
from torch_hybrid_backend.loops.layout import Blocked
from torch_hybrid_backend.sizes.size import Dim, known_int, size_hint

# How much longer a kernel takes whose streamed weights push each other out of the cache: 2048x7x7 to 512, 1x1 (docs/performance.md).
_CROWDED = 1.15


@dataclass(frozen=True, slots=True)
class Tiling:
    """Channel blocks per task, the number of column tiles, input channels per chunk, output rows per chunked task (0: not chunked)."""

    blocks: Split
    column_tiles: int
    chunk: int
    chunk_rows: int


def reads_one_long_row(parts: ConvParts) -> bool:
    """True if the kernel is 1x1 with stride 1 and no index of the input has to divide a position into row and column."""
    if not (parts.rows.is_pointwise and parts.columns.is_pointwise) or parts.rows.out == 1:
        return False
    pixel = LoopVar("pixel", parts.rows.out * parts.columns.out)
    position = Index(((pixel, 1),), 0)
    env = dict(
        zip(parts.kernel.x_vars[-2:], (position // parts.columns.out, position % parts.columns.out), strict=True)
    )
    for load in loads_of(parts.kernel.x):
        offset = parts.printer.offset(load.buffer, load.index, env)
        if offset.divides(pixel):
            return False
    return True


def channel_block(parts: ConvParts) -> int:
    """Input channels that lie together: the loop over channels is split there, so that no address needs a division."""
    channels = known_int(parts.packed.shape[3])
    found = {
        layout.block
        for load in loads_of(parts.kernel.x)
        if isinstance(layout := parts.printer.arguments[load.buffer][1], Blocked)
    }
    block = max(found, default=channels * parts.together) // parts.together
    return channels if parts.kernel.groups > 1 and channels % block else min(block, channels)


def vectors_along(parts: ConvParts) -> str:
    """ "channels" or "columns": along which neighbours of the input are loaded as a vector, whose elements are then multiplied one by one; ""
    where they are loaded one by one."""
    lanes = lanes_of(parts.target, parts.dtype)
    if not parts.target.isa.loads_apart or parts.block != lanes or parts.columns.is_open:
        return ""
    steps = [
        (step(offset, parts.kernel.x_vars[1]), step(offset, parts.kernel.x_vars[-1]))
        for offset in offsets_of(parts.printer, [parts.kernel.x])
    ]
    if channel_block(parts) % lanes == 0 and all(along in (0, 1) for along, _ in steps):
        return "channels"
    return "columns" if parts.dot is not None and all(across == parts.together for _, across in steps) else ""


def choose_tiling(parts: ConvParts, open_rows: Axis[Dim], open_columns: Axis[Dim], is_flat: bool) -> Tiling:
    """Blocks and columns per register tile: the kernel's `schedule_rank` of those there are, by estimated time; ties go to fewer loads."""
    groups, all_blocks, *_ = map(known_int, parts.packed.shape)
    rows, columns = open_rows.typical(), open_columns.typical()
    target, vectors = parts.target, max(1, parts.block // lanes_of(parts.target, parts.dtype))
    found: dict[tuple[Split, int], float] = {}
    time = _vector_tile_time if vectors_along(parts) else _tile_time
    for most in range(1, min(all_blocks, target.isa.registers // 4) + 1):
        blocks = split_into(all_blocks, -(-all_blocks // most))
        tiles = -(-columns.out // most_columns(parts, columns, blocks.size * vectors))
        split = split_into(columns.out, tiles)
        chunk_rows = _chunks(parts, rows, columns, blocks, open_columns)[1]
        turns = -(-rows.out // chunk_rows) if chunk_rows else tiles if is_flat else rows.out
        tasks = size_hint(parts.images) * groups * blocks.parts * turns
        weight = (
            parts.weight_bytes
            * blocks.size
            * parts.block
            * known_int(parts.packed.shape[3])
            * rows.kernel
            * columns.kernel
        )
        is_far = weight > target.l1_bytes // 2 and rows.out * columns.out > 1
        work = sum(
            n_blocks * n_columns * time(b * vectors, c, b * parts.block if is_far else 0)
            for _, n_blocks, b in blocks.runs()
            for _, n_columns, c in split.runs()
        )
        idle = -(-tasks // target.cores) * target.cores / tasks
        # The weight of a task and the one that it asks for ahead must stay in the cache beside the input, tile after tile.
        crowded = not chunk_rows and streams(parts) and 3 * weight > target.l2_bytes
        found.setdefault((blocks, tiles), work * idle * (_CROWDED if crowded else 1.0))
    blocks, tiles = parts.builder.ranked_choice(found)
    return Tiling(blocks, tiles, *_chunks(parts, rows, columns, blocks, open_columns))


def most_columns(parts: ConvParts, columns: Axis[Dim], vectors: int) -> int:
    """The most output columns of a register tile.

    LLVM keeps an input element in a register that several columns read at different taps of an unrolled kernel row: those need
    room beside the accumulators, or accumulators are stored and loaded in every step (3x the time for 3x3 and 2 blocks of 14 columns).
    """
    spare = 0 if parts.dot is None else parts.dot.registers
    if is_wide(columns):
        return max_rows(vectors, parts.target, spare)
    match vectors_along(parts):
        case "channels":
            # Of an element that columns read at neighbouring taps, the last to be read waits for its turn.
            return max_rows(vectors, parts.target, spare + -(-columns.dilation // columns.stride), by_element=True)
        case "columns":
            room = parts.target.isa.registers - 1 - spare - vectors
            fits = (c for c in range(MAX_ROWS, 0, -1) if c * vectors + -(-columns.width(c) // parts.block) <= room)
            return next(fits, 1)
    most = max_rows(vectors, parts.target, spare)
    registers = parts.target.isa.registers - 1 - spare - vectors
    return next((c for c in range(most, 0, -1) if c * vectors + columns.shared(c) <= registers), 1)


def _chunks(
    parts: ConvParts, rows: Axis[int], columns: Axis[int], blocks: Split, open_columns: Axis[Dim]
) -> tuple[int, int]:
    """Input channels and output rows per chunk; (all channels, 0) where the weight of one task fits the cache, and where the image's width is
    only known at run time: tiles overlap there, and partial sums of what two tiles have in common would be added twice."""
    groups, _, _, channels, _, block = map(known_int, parts.packed.shape[:6])
    together, l2 = channel_block(parts), parts.target.l2_bytes
    row_bytes = columns.out * blocks.size * block * 4
    channel_bytes = blocks.size * block * rows.kernel * columns.kernel * parts.weight_bytes
    sizes = [c for c in range(together, channels, together) if channels % c == 0 and c * channel_bytes <= l2 // 4]
    fits = channels * channel_bytes <= l2 // 2
    if fits or not sizes or rows.out == 1 or row_bytes > l2 // 8 or open_columns.is_open:
        return channels, 0
    wanted = -(-2 * parts.target.cores // (size_hint(parts.images) * groups * blocks.parts))
    pieces = max(1, wanted, -(-rows.out * row_bytes // (l2 // 4)))
    return sizes[-1], -(-rows.out // min(pieces, rows.out))


def _tile_time(vectors: int, columns: int, far: int) -> float:
    """Half cycles per step of the reduction: two multiply-adds and two loads per cycle; short tiles wait for the last sum; `far` elements of
    the weight from the second-level cache, eight a cycle, come beside the multiply-adds."""
    return max(vectors * columns, vectors + columns, IN_FLIGHT, far / 4) + 0.1 * (vectors + columns)


def _vector_tile_time(vectors: int, columns: int, far: int) -> float:
    """The same where the elements of columns are loaded four at a time: three instructions of a core that decodes three or four a cycle, of
    which a load counts for two."""
    products = vectors * columns
    return max(products, (products + 2 * (vectors + columns / 4)) / 1.5, IN_FLIGHT, far / 4)
