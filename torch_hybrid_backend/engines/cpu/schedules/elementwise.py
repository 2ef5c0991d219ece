"""Elementwise kernels: every point of the domain once, in the order in which the first result lies in memory.

Pattern: any number of stores over one domain, each a scalar expression of loads: relu(x + y), a transposed copy, a padded one.

Strategy
1. The vector axis is the dimension along which most accesses, the first store's above all, go element by element.
2. Dimensions outside it join it as long as every access stays a plain sum: contiguous tensors become one long axis.
3. A blocked dimension (NCHW16c) is walked as (block, lane): its lanes are the vector; copies that move channels between lanes are left to
   `channel_moves`, few channels of an image that lies in planes, and rows of a matrix that words are made of, to `interleaved`.
4. Where guards depend on the vector axis, it is cut where they turn: parts of a concatenation, margins and middle of a padded row.
5. The other dimensions, and blocks of a long vector axis, are one parallel loop; small kernels stay on one thread.
6. What does not fill a vector is done by ever narrower vectors, without predicates.

Not used: tiling of transposes (both sides of a transposed copy cannot be contiguous; one side is gathered).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hybrid_backend.engines.cpu.schedules.axes import (
    Env,
    Flat,
    fastest,
    flatten,
    is_large,
    offsets_of,
    pieces,
    step,
    vectors,
)
from torch_hybrid_backend.engines.cpu.schedules.channel_moves import channel_moves
from torch_hybrid_backend.engines.cpu.schedules.interleaved import interleaved
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.kernels import MapKernel
from torch_hybrid_backend.loops.layout import Blocked
from torch_hybrid_backend.sizes.size import Dim, Size, known_int, size_hint

# Elements of a long vector axis that one task runs through: enough to pay for its start, few enough to share them out.
_CHUNK = 4_096


def emit(kernel: MapKernel, builder: Builder, printer: Printer, target: Target) -> Stmt:
    """The loops of an elementwise kernel."""
    exprs = [store.value for store in kernel.stores]
    written = [printer.offset(store.buffer, store.index, {}) for store in kernel.stores]
    offsets = [*written, *offsets_of(printer, exprs)]
    inner = fastest(written, kernel.domain) or fastest(offsets, kernel.domain)
    outer = [v for v in kernel.domain if v.extent != 1 and v is not inner]
    # Row-major in the first result's memory: the largest steps outermost.
    outer.sort(key=lambda v: -step(written[0], v))
    is_parallel = is_large(kernel, exprs)
    if inner is None:
        return _outer(builder, outer, is_parallel, lambda env: printer.stores(kernel.stores, env))
    block = _block(kernel, inner)
    kind = "parallel" if is_parallel else "serial"
    if block is None:
        if (words := _words(kernel, builder, printer, target, inner, written[0], kind)) is not None:
            return words
        flat = flatten(inner, outer, offsets, exprs)
        outer = [v for v in outer if v not in flat.variables]
        parts = pieces(printer, exprs, inner) if flat.variables == (inner,) else [(0, flat.extent)]

        def along(env: Env, start: Index | Dim, extent: Dim) -> Stmt:
            return _along(kernel, builder, printer, target, flat, env, start, extent)

        if is_parallel and _is_long(flat, outer):
            return builder.seq(*(_chunked(builder, outer, along, *part) for part in parts))
        return _outer(builder, outer, is_parallel, lambda env: builder.seq(*(along(env, *part) for part in parts)))
    moved = channel_moves(kernel, builder, printer, inner, kind)
    moved = moved or interleaved(kernel, builder, printer, target, inner, kernel.domain[-1], block, kind)
    return moved or _blocked(kernel, builder, printer, block, inner, outer, is_parallel)


def _is_long(flat: Flat, outer: Sequence[LoopVar]) -> bool:
    """True if the vector axis is to be cut: where it is long, or nothing else gives the threads work whatever its size will be."""
    return size_hint(flat.extent) >= 2 * _CHUNK or (isinstance(flat.extent, Size) and not outer)


def _words(
    kernel: MapKernel, builder: Builder, printer: Printer, target: Target, inner: LoopVar, written: Index, kind: str
) -> Stmt | None:
    """A matrix into words of its rows (`interleaved`): few elements along `inner` lie together, then those along another dimension."""
    if inner.extent not in (2, 4) or step(written, inner) != 1:
        return None
    beside = [v for v in kernel.domain if step(written, v) == inner.extent]
    if len(beside) != 1:
        return None
    return interleaved(kernel, builder, printer, target, inner, beside[0], known_int(inner.extent), kind)


def _block(kernel: MapKernel, inner: LoopVar) -> int | None:
    """The block size of the first result's layout, where the vector axis is its blocked dimension."""
    layout = next(a.layout for a in kernel.writes if a.buffer is kernel.stores[0].buffer)
    if not isinstance(layout, Blocked) or layout.block == 1 or len(kernel.domain) < 2:
        return None  # a plain result may have another rank than the domain
    return (
        layout.block
        if kernel.domain[1] == inner and isinstance(inner.extent, int) and kernel.stores[0].index[1] == index_of(inner)
        else None
    )


def _along(
    kernel: MapKernel,
    builder: Builder,
    printer: Printer,
    target: Target,
    flat: Flat,
    env: Env,
    start: Index | Dim,
    extent: Dim,
) -> Stmt:
    def body(base: Index, lane: Index, width: int) -> Stmt:
        return printer.stores(kernel.stores, {**env, **flat.env(base + lane + start)})

    return vectors(builder, printer, extent, target.lanes, body)


def _outer(builder: Builder, variables: Sequence[LoopVar], is_parallel: bool, body: Callable[[Env], Stmt]) -> Stmt:
    """The loops around the vector axis, one parallel loop where the kernel is large."""
    return builder.fused(
        [v.extent for v in variables],
        lambda at: body(dict(zip(variables, at, strict=True))),
        "parallel" if is_parallel else "serial",
    )


def _chunked(
    builder: Builder,
    variables: Sequence[LoopVar],
    along: Callable[[Env, Index | Dim, Dim], Stmt],
    start: Dim,
    extent: Dim,
) -> Stmt:
    """The same around a piece of a long vector axis, which is cut: `along` runs through a part of it."""
    extents = [v.extent for v in variables]
    whole = extent // _CHUNK
    rest = extent - whole * _CHUNK
    parts: list[Stmt] = []

    def env_at(coordinates: tuple[Index, ...]) -> Env:
        return dict(zip(variables, coordinates, strict=True))

    if whole != 0:
        parts.append(
            builder.fused(
                [*extents, whole], lambda at: along(env_at(at[:-1]), at[-1] * _CHUNK + start, _CHUNK), "parallel"
            )
        )
    if rest != 0:
        kind = "parallel" if len(variables) else "serial"
        parts.append(builder.fused(extents, lambda at: along(env_at(at), start + whole * _CHUNK, rest), kind))
    return builder.seq(*parts)


def _blocked(
    kernel: MapKernel,
    builder: Builder,
    printer: Printer,
    block: int,
    channel: LoopVar,
    outer: Sequence[LoopVar],
    is_parallel: bool,
) -> Stmt:
    """(outer dimensions, channel block) in parallel, the last dimension serial inside, lanes of one block as the vector."""
    kind = "parallel" if is_parallel else "serial"
    first = [v for v in kernel.domain[:1] if v.extent != 1]
    spatial = [v for v in kernel.domain[2:] if v.extent != 1]
    rows, columns = spatial[:-1], spatial[-1:]

    def at(coordinates: tuple[Index, ...], block_index: Index | int, width: int) -> Stmt:
        env: Env = dict(zip([*first, *rows], coordinates, strict=True))

        def column(place: tuple[Index, ...]) -> Stmt:
            inside = {**env, **dict(zip(columns, place, strict=True))}

            def body(base: Index, lane: Index, _: int) -> Stmt:
                return printer.stores(kernel.stores, {**inside, channel: base + lane + block_index * block})

            return vectors(builder, printer, width, block, body)

        return builder.nest([v.extent for v in columns], column)

    assert isinstance(channel.extent, int)
    whole, rest = divmod(channel.extent, block)
    extents = [v.extent for v in (*first, *rows)]
    parts: list[Stmt] = []
    if whole:
        order = [*extents[: len(first)], whole, *extents[len(first) :]]

        def in_block(place: tuple[Index, ...]) -> Stmt:
            return at((*place[: len(first)], *place[len(first) + 1 :]), place[len(first)], block)

        parts.append(builder.fused(order, in_block, kind))
    if rest:
        parts.append(builder.fused(extents, lambda place: at(place, whole, rest), kind if extents else "serial"))
    return builder.seq(*parts)
