"""Axes: how a schedule runs through a kernel's domain.

A domain dimension is walked by one loop, except where it lies in blocks (NCHW16c channels), where it is walked as (block, lane). What
memory order a dimension has is read off the offsets of the kernel's accesses, so that every layout is treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_hybrid_backend.engines.cpu.tile_sizes import lane_chunks
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Mod, as_index, index_of
from torch_hybrid_backend.loops.ir import Call, Expr, FromIndex, count_calls, loads_of, parts
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.sizes.size import Dim, Size, known_at_most, product, size_hint

Env = dict[LoopVar, Index]

# Below this many scalar operations a kernel runs on one thread: waking the others costs some microseconds, the work about as much.
PARALLEL_WORK = 16_384
# Each piece of a vector axis is code of its own.
_MAX_PIECES = 16


def offsets_of(printer: Printer, exprs: Sequence[Expr]) -> list[Index]:
    """Memory offsets of the loads of some expressions, over the domain's variables; kernel-local buffers are left out."""
    found = []
    for expr in exprs:
        for load in loads_of(expr):
            if load.buffer in printer.arguments:
                found.append(printer.offset(load.buffer, load.index, {}))
    return found


def step(offset: Index, variable: LoopVar) -> int:
    """Elements from one value of `variable` to the next, 0 where the offset does not depend on it; large where that is irregular."""
    smallest = 0
    for atom, coefficient in offset.terms:
        own = 0
        if atom == variable:
            own = _stride(coefficient)
        elif isinstance(atom, Mod) and depends(atom.numerator, variable):
            inner = step(atom.numerator, variable)
            own = _stride(coefficient) * inner
        elif isinstance(atom, FloorDiv) and depends(atom.numerator, variable):
            continue
        if own and (not smallest or own < smallest):
            smallest = own
    return smallest


def _stride(coefficient: Dim) -> int:
    """The distance in memory between neighbours; a stride known only at run time is never taken for 1."""
    return abs(coefficient) if isinstance(coefficient, int) else max(2, abs(size_hint(coefficient)))


def depends(index: Index, variable: LoopVar) -> bool:
    """True if an index depends on a loop variable."""
    return variable in index.leaves()


def is_free_of(atom: object, variable: LoopVar) -> bool:
    """True if an index's atom certainly does not depend on a loop variable; what is read from a tensor may."""
    match atom:
        case LoopVar():
            return atom != variable
        case FloorDiv() | Mod():
            return all(is_free_of(inner, variable) for inner, _ in atom.numerator.terms)
    return False


def fastest(offsets: Sequence[Index], variables: Sequence[LoopVar]) -> LoopVar | None:
    """The variable along which most memory is run through one element at a time; later dimensions win ties.

    An access counts with the elements it touches: a batch norm reads several values per channel, but it is the images that
    must be read in order.
    """
    best, votes = None, 0
    for variable in variables:
        count = sum(_touched(offset, variables) for offset in offsets if step(offset, variable) == 1)
        if variable.extent != 1 and count >= max(votes, 1):
            best, votes = variable, count
    return best


def _touched(offset: Index, variables: Sequence[LoopVar]) -> int:
    """Elements that an access touches over all values of the variables, typically."""
    return size_hint(product(v.extent for v in variables if depends(offset, v)))


def is_plain(index: Index) -> bool:
    """True if an index has no divisions."""
    return not any(isinstance(atom, FloorDiv | Mod) for atom, _ in index.terms)


@dataclass(frozen=True, slots=True)
class Flat:
    """Several domain dimensions walked as one, row-major."""

    variables: tuple[LoopVar, ...]

    @property
    def extent(self) -> Dim:
        return product(v.extent for v in self.variables)

    def env(self, position: Index) -> Env:
        """The dimensions' values at a position of the flat axis."""
        found: Env = {}
        stride = self.extent
        for variable in self.variables:
            stride = stride // variable.extent
            found[variable] = position // stride % variable.extent if variable.extent != 1 else as_index(0)
        return found


def flatten(inner: LoopVar, candidates: Sequence[LoopVar], offsets: Sequence[Index], exprs: Sequence[Expr]) -> Flat:
    """The widest flat axis ending in `inner` along which every access stays a plain sum.

    `candidates` are dimensions outside `inner`, the nearest last. Those that an expression computes with keep apart.
    """
    flat, apart = Flat((inner,)), _computed_with(exprs)
    if inner in apart:
        return flat
    for variable in reversed(candidates):
        if variable in apart:
            break
        wider = Flat((variable, *flat.variables))
        probe = LoopVar("flat", wider.extent)
        env = wider.env(index_of(probe))
        if not all(is_plain(offset.substitute(env)) for offset in offsets if _touches(offset, wider)):
            break
        flat = wider
    return flat


def _touches(offset: Index, flat: Flat) -> bool:
    return any(depends(offset, v) for v in flat.variables)


def _computed_with(exprs: Sequence[Expr]) -> set[LoopVar]:
    """The variables whose values expressions compute with, rather than only read at."""
    return {a for e in parts(exprs) if isinstance(e, FromIndex) for a in e.index.leaves() if isinstance(a, LoopVar)}


def pieces(printer: Printer, exprs: Sequence[Expr], variable: LoopVar) -> list[tuple[Dim, Dim]]:
    """A dimension as pieces (start, extent) within which the guards that depend on it alone are decided, in order.

    A concatenation along the vector axis is one piece for each part, a padded row is its two margins and what lies between: each is a plain
    copy, where a guard in the vector loop would read element by element. The whole dimension where the pieces are too many, or its size is
    known only at run time.
    """
    if isinstance(variable.extent, Size):
        return [(0, variable.extent)]
    found: set[Dim] = set()
    conditions = [e.args[0] for e in parts(exprs) if isinstance(e, Call) and e.op == "guard"]
    for comparison in parts(conditions):
        sides = printer.index_sides(comparison, {}) if isinstance(comparison, Call) else None
        if sides is None or not isinstance(comparison, Call):
            continue
        difference = sides[0] - sides[1]
        if len(difference.terms) == 1 and difference.terms[0] in ((variable, 1), (variable, -1)):
            found.update(_turns(comparison.op, difference))
    ends: list[Dim] = []
    for end in sorted(found, key=size_hint):
        if known_at_most(end, 0) or known_at_most(variable.extent, end):
            continue
        if isinstance(end, Size):
            return [(0, variable.extent)]
        ends.append(end)
    if len(ends) >= _MAX_PIECES:
        return [(0, variable.extent)]
    starts = [0, *ends]
    return [(start, end - start) for start, end in zip(starts, [*ends, variable.extent], strict=True)]


def _turns(comparison: str, difference: Index) -> list[Dim]:
    """Points along its variable where `difference OP 0` changes; the difference is the variable, or minus it, and a constant."""
    is_rising = difference.terms[0][1] == 1
    zero = -difference.const if is_rising else difference.const
    if comparison in ("eq", "ne"):
        return [zero, zero + 1]
    return [zero if (comparison in ("lt", "ge")) == is_rising else zero + 1]


def is_large(kernel: Kernel, exprs: Sequence[Expr]) -> bool:
    """True if threads are worth waking; where sizes are known only at run time they may be."""
    points = product(v.extent for v in kernel.domain)
    return isinstance(points, Size) or _work(points, exprs) >= PARALLEL_WORK


def _work(points: int, exprs: Sequence[Expr]) -> int:
    """Scalar operations, roughly."""
    return points * (1 + sum(count_calls(e) + len(loads_of(e)) for e in exprs))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A vector of `width` positions from `start` on; with a `condition` where only the running kernel knows whether it is there."""

    start: Index
    width: int
    condition: TirExpr | None = None

    def around(self, builder: Builder, statement: Stmt) -> Stmt:
        return statement if self.condition is None else builder.when(self.condition, statement)


def chunks(builder: Builder, count: Dim, lanes: int) -> list[Chunk]:
    """Ever narrower vectors that cover 0 .. count-1. A count known only at run time is below `2 * lanes`, a power of two."""
    if isinstance(count, int):
        return [Chunk(as_index(first), width) for first, width in lane_chunks(count, lanes)]
    found, width = [], lanes
    while width:
        bit = builder.size(count // width % 2) == 1
        found.append(Chunk(as_index(count // (2 * width) * (2 * width)), width, bit))
        width //= 2
    return found


def vectors(
    builder: Builder,
    printer: Printer,
    extent: Dim,
    lanes: int,
    body: Callable[[Index, Index, int], Stmt],
) -> Stmt:
    """Run `body(base, lane, width)` over positions 0 .. extent-1: whole vectors in a loop, then ever narrower ones.

    The body's statements are emitted inside the vector loop; the position is `base + lane`.
    """
    whole = extent // lanes
    parts: list[Stmt] = []
    if whole != 0:
        parts.append(
            builder.loop(whole, lambda v: printer.vector_loop(lanes, lambda lane: body(v * lanes, lane, lanes)))
        )
    for chunk in chunks(builder, extent - whole * lanes, lanes if isinstance(extent, int) else lanes // 2):

        def narrow(lane: Index, chunk: Chunk = chunk) -> Stmt:
            return body(chunk.start + whole * lanes, lane, chunk.width)

        parts.append(chunk.around(builder, printer.vector_loop(chunk.width, narrow)))
    return builder.seq(*parts)
