"""Copies that move channels between lanes of blocked tensors: shuffles, slices and concatenations that do not start at a block.

Pattern: a `MapKernel` with one store, blocked in the channels, whose value is for each channel one element of some blocked tensor at the
same block size: ShuffleNet's concatenation and channel shuffle, half of the channels of a tensor.

Strategy
1. For every channel it is known beforehand which tensor, block and lane it comes from: guards are decided channel by channel.
2. A block of the result is a fixed permutation of the lanes of a few vectors (one instruction for two of them), the same at every pixel.
3. One parallel loop over (image, row); inside it the blocks one after the other, each a loop over the pixels of the row.

Not used: element by element gathers, which TVM emits for an index that divides the lane: 30 us for 116 channels of 28x28, not 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.schedules.axes import Env
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Buffer, Call, Expr, Load
from torch_hybrid_backend.loops.kernels import MapKernel
from torch_hybrid_backend.loops.layout import Blocked

# A block that gathers from more vectors takes more permutations than its elements take loads.
_MAX_SOURCES = 4
# Each block is code of its own.
_MAX_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class _Source:
    """A vector of one block: the offset of its first lane over the kernel's domain without the channel."""

    buffer: Buffer
    offset: Index


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of the result: lane i is lane `lanes[i] % block` of source `lanes[i] // block`."""

    sources: tuple[_Source, ...]
    lanes: tuple[int, ...]

    @property
    def is_aligned(self) -> bool:
        return len(self.sources) == 1 and self.lanes == tuple(range(len(self.lanes)))


def channel_moves(kernel: MapKernel, builder: Builder, printer: Printer, channel: LoopVar, kind: str) -> Stmt | None:
    """The kernel's body; None where it is no such copy, or one of whole blocks. `channel` is dimension 1 of the domain."""
    blocks = _blocks(kernel, printer, channel)
    if blocks is None or all(block.is_aligned for block in blocks):
        return None
    store = kernel.stores[0]
    target = printer.arguments[store.buffer][0]
    outer = [v for v in (kernel.domain[0], *kernel.domain[2:-1]) if v.extent != 1]
    column = kernel.domain[-1]
    width = len(blocks[0].lanes)

    def block(number: int, env: Env) -> Stmt:
        def at(place: Index) -> Stmt:
            inside = {**env, column: place}
            start = printer.offset(store.buffer, store.index, {**inside, channel: as_index(number * width)})
            return builder.store_vector(target, start, _gathered(blocks[number], inside), width)

        return builder.loop(column.extent, at, name="w")

    def _gathered(one: _Block, env: Env) -> TirExpr:
        vectors = [
            builder.load_vector(printer.arguments[s.buffer][0], s.offset.substitute(env), width) for s in one.sources
        ]
        return vectors[0] if one.is_aligned else tir.shuffle(vectors, one.lanes)

    def row(place: Sequence[Index]) -> Stmt:
        env = dict(zip(outer, place, strict=True))
        return builder.seq(*(block(number, env) for number in range(len(blocks))))

    return builder.fused([v.extent for v in outer], row, kind)


def _blocks(kernel: MapKernel, printer: Printer, channel: LoopVar) -> list[_Block] | None:
    """The sources of each block's lanes; None where some channel is anything but an element of a tensor blocked alike."""
    store, extent = kernel.stores[0], channel.extent
    layout = printer.arguments[store.buffer][1]
    if len(kernel.stores) != 1 or not isinstance(layout, Blocked) or not isinstance(extent, int):
        return None
    if store.buffer.dtype != "float32" or extent > _MAX_BLOCKS * layout.block or len(kernel.domain) < 3:
        return None
    found: list[_Block] = []
    for first in range(0, extent, layout.block):
        sources: dict[_Source, int] = {}
        lanes: list[int] = []
        for c in range(first, min(first + layout.block, extent)):
            element = _element(printer, store.value, channel, c, layout.block)
            if element is None:
                return None
            source, lane = element
            lanes.append(sources.setdefault(source, len(sources)) * layout.block + lane)
        if len(sources) > _MAX_SOURCES:
            return None
        lanes += range(len(lanes), layout.block)  # padding: anything
        found.append(_Block(tuple(sources), tuple(lanes)))
    return found


def _element(printer: Printer, value: Expr, channel: LoopVar, c: int, block: int) -> tuple[_Source, int] | None:
    """The vector and the lane in it that channel `c` of the result is read from."""
    env = {channel: as_index(c)}
    while isinstance(value, Call) and value.op == "guard":
        holds = printer.decide(value.args[0], env)
        if holds is None:
            return None
        value = value.args[1] if holds else value.args[2]
    if not isinstance(value, Load) or value.buffer.dtype != "float32" or value.buffer not in printer.arguments:
        return None
    layout = printer.arguments[value.buffer][1]
    index = [printer.index(i, env) for i in value.index]
    if not isinstance(layout, Blocked) or layout.block != block or not index[1].is_const:
        return None
    assert isinstance(index[1].const, int)
    lane = index[1].const % block
    index[1] -= lane
    return _Source(value.buffer, printer.offset(value.buffer, tuple(index), {})), lane
