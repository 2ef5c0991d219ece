"""Reductions that need the result of another one, and yet can be found in the same pass over a row.

    squares        s = sum of x, q = sum of (x - s / n)^2     a variance: Youngs and Cramer 1971, which is Welford's recurrence of 1962 over
                                                              sums, combined as Chan, Golub and LeVeque 1983
    exponentials   m = max of x, t = sum of exp(x - m)        softmax: Milakov and Gimelshein 2018

They are told by what is computed, whatever operators it came from. Stages are as in `RowKernel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_hybrid_backend.loops.index import as_index
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, FromIndex, Load, buffers_of_expr
from torch_hybrid_backend.loops.kernels import RowKernel, Stage
from torch_hybrid_backend.loops.ops import is_float, literal
from torch_hybrid_backend.loops.sharing import Sharing
from torch_hybrid_backend.sizes.size import Dim, product


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A reduction found together with `base`, the sum or the maximum of the same `base.value`. `centre`: what is subtracted from an element of
    a row, in terms of `base`'s result."""

    kind: str  # "squares" or "exponentials"
    base: Stage
    centre: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """In which pass over its rows each stage of a kernel runs, and the reductions that need no pass of their own."""

    of: Mapping[Stage, int]
    joined: Mapping[Stage, Joined]

    @property
    def count(self) -> int:
        """The number of times that a row is read where it is not held in registers."""
        return len({number for stage, number in self.of.items() if stage.kind in ("reduce", "store")})


def passes_of(kernel: RowKernel) -> Passes:
    """A stage runs after the reductions that it needs, directly or through what is mapped."""
    joined = _joined(kernel.stages, product([kernel.domain[d].extent for d in kernel.axes]))
    ready: dict[Buffer, int] = {}
    of: dict[Stage, int] = {}
    for stage in kernel.stages:
        needed = joined[stage].base.value if stage in joined else stage.value
        own = of[stage] = max((ready.get(buffer, 0) for buffer in buffers_of_expr(needed)), default=0)
        if stage.local is not None:
            ready[stage.local] = own + 1 if stage.kind == "reduce" else own
    return Passes(of, joined)


def _joined(stages: Sequence[Stage], count: Dim) -> dict[Stage, Joined]:
    found: dict[Stage, Joined] = {}
    by_local = {stage.local: stage for stage in stages if stage.local is not None}
    sharing = Sharing()

    def resolved(e: Expr) -> Expr:
        """The expression behind the name of something mapped, or computed once per row."""
        while isinstance(e, Load) and e.buffer in by_local and by_local[e.buffer].kind in ("map", "scalar"):
            e = by_local[e.buffer].value
        return e

    def is_same(a: Expr, b: Expr) -> bool:
        return sharing.of(resolved(a)) is sharing.of(resolved(b))

    def base_of(e: Expr, combiner: str, element: Expr) -> Stage | None:
        """The reduction of `element` whose result `e` is."""
        e = resolved(e)
        stage = by_local.get(e.buffer) if isinstance(e, Load) else None
        if stage is None or (stage.kind, stage.combiner) != ("reduce", combiner) or not is_same(stage.value, element):
            return None
        return stage

    for stage in stages:
        if (stage.kind, stage.combiner) != ("reduce", "sum") or not is_float(stage.value.dtype):
            continue
        match resolved(stage.value):
            case Call(_, "mul", (a, b)) if is_same(a, b):
                match resolved(a):
                    case Call(_, "sub", (element, centre)):
                        match resolved(centre):
                            case Call(_, "div", (total, n)) if _is_count(n, count):
                                if (base := base_of(total, "sum", element)) is not None:
                                    found[stage] = Joined("squares", base, centre)
            case Call(_, "exp" | "exp_nonpositive", (Call(_, "sub", (element, centre)),)):
                if (base := base_of(_unless_infinite(resolved(centre)), "max", element)) is not None:
                    found[stage] = Joined("exponentials", base, centre)
    return found


def _is_count(e: Expr, count: Dim) -> bool:
    match e:
        case Const(dtype, value) if isinstance(count, int):
            return value == literal(count, dtype).value
        case Call(_, "cast", (FromIndex(_, index),)):
            return index == as_index(count)
    return False


def _unless_infinite(e: Expr) -> Expr:
    """m of `where(isinf(m), 0, m)`, which log-sum-exp subtracts; any other expression itself."""
    match e:
        case Call(_, "where", (Call(_, "isinf", (tested,)), Const(_, 0), value)) if tested is value:
            return value
    return e
