"""The weight of a direct convolution on its way through a core's cache: when it streams, and its prefetch.

A parallel loop over (part of the channel blocks, turn of the input) goes through the weight once, and through the whole input for every part;
the other order is the other way round. Where the weight streams, each turn asks for a share of what the same core reads next: in a network
larger than the caches weights come from memory in every call, and the first turn of each part would wait for all of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.schedules.convolution.parts import ConvParts
from torch_hybrid_backend.engines.cpu.target import LINE_BYTES
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Stmt, TirExpr
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.sizes.size import known_int, size_hint

# In one step: more would be much code, and wait for each other.
_MAX_LINES = 64


def streams(parts: ConvParts) -> bool:
    """True if the weight is gone through once: it is larger than an image of the input, or than half the cache, where it could stay."""
    weight = math.prod(map(known_int, parts.packed.shape[:6])) * parts.weight_bytes
    pixels = size_hint(parts.rows.size * parts.columns.size)
    image = parts.in_channels // parts.together * pixels * parts.x_bytes
    return weight > min(parts.target.l2_bytes // 2, image)


@dataclass(frozen=True, slots=True)
class Task:
    """The part of the result that a task writes: image, group, first channel block, number of blocks, and its part of all channel blocks."""

    image: Index
    group: Index
    first_block: Index
    blocks: int
    part: Index


@dataclass(frozen=True, slots=True)
class WeightStream:
    """The parallel loop over (image, group, `blocks` parts, `turns`), whose every turn takes `steps` steps that may prefetch."""

    parts: ConvParts
    blocks: int
    turns: int
    steps: int

    def prefetch(self, task: Task, step: Index) -> Stmt | None:
        """A share of the blocks behind the task's; of its own where another core takes those. None where shares would be too large.

        `step`: its number among those of the part, all turns counted.
        """
        groups, group_blocks, *inner = map(known_int, self.parts.packed.shape)
        block_size, line = math.prod(inner), LINE_BYTES // tir.itemsize(self.parts.packed.dtype)
        share = -(-task.blocks * block_size // (line * self.turns * self.steps))
        if share > _MAX_LINES:
            return None
        first = ((task.image * groups + task.group) * self.blocks + task.part) * self.turns
        per_core = -(-size_hint(self.parts.images) * groups * self.blocks * self.turns // self.parts.target.cores)
        block = task.group * group_blocks + task.first_block
        b, following = self.parts.builder, (block + task.blocks) % (groups * group_blocks)
        mine = tir.equal(b.index((first + self.turns) // per_core), b.index((first + step // self.steps) // per_core))
        start: TirExpr = tir.select(mine, b.index(following * block_size), b.index(block * block_size))
        array = self.parts.printer.arguments[self.parts.packed][0]
        places = [start + b.index(step * (share * line) + i * line) for i in range(share)]
        return b.seq(*[b.prefetch(array, place) for place in places])


@dataclass(frozen=True, slots=True)
class WeightChunks:
    """A task that goes through its weight in `chunks` of the input channels, and with each through `rows` rows of output.

    `pieces`: tasks that go through the same weight. `together`: input channels between two places that may prefetch.
    """

    parts: ConvParts
    chunks: int
    rows: int
    pieces: int
    together: int

    def prefetch(self, task: Task, chunk: Index, row: Index, kh: Index, channel: Index) -> Stmt | None:
        """A row's share of the next chunk, or of the next task's first: what lies there as kernel row `kh` and `channel` do here."""
        groups, blocks, kernel_rows, channels, columns, lanes = map(known_int, self.parts.packed.shape[:6])
        block = lanes * self.parts.together
        line = LINE_BYTES // tir.itemsize(self.parts.packed.dtype)
        share = -(-self.together * columns * block // (line * self.rows))
        if share * task.blocks > _MAX_LINES:
            return None
        b, size = self.parts.builder, kernel_rows * channels * columns * block
        own = task.group * blocks + task.first_block
        following = own if self.pieces > 1 else (own + task.blocks) % (groups * blocks)
        step = channels // self.chunks
        within = (kh * channels + channel) * (columns * block) + row * (share * line)
        is_last = b.equal(chunk, self.chunks - 1)
        start: TirExpr = tir.select(
            is_last,
            b.index(following * size + within - (self.chunks - 1) * step * columns * block),
            b.index(own * size + within + step * columns * block),
        )
        array = self.parts.printer.arguments[self.parts.packed][0]
        places = [start + b.index(v * size + i * line) for v in range(task.blocks) for i in range(share)]
        return b.seq(*[b.prefetch(array, place) for place in places])
