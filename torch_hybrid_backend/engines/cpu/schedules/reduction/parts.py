"""Parts that reductions along rows and across them share: how partial results combine, and values in locals, in the form of `storage`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch_hybrid_backend.engines.cpu.schedules.axes import Env
from torch_hybrid_backend.engines.cpu.tir import expressions as tir
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.math import is_nan
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.engines.cpu.tir.storage import storage_dtype
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.loops.kernels import Stage
from torch_hybrid_backend.loops.ops import is_float

# Independent accumulators of a row: latency of an addition (4) on current x86 cores.
WAYS = 4
# What finds the position of an extreme -> what finds the extreme.
EXTREMES = {"argmax": "max", "argmin": "min"}


def computed(printer: Printer, expr: Expr, env: Env, dtype: str, use: Callable[[TirExpr], Stmt]) -> Stmt:
    """`use` of a value as locals hold it; guards that no lane decides become branches."""
    return printer.cases(
        [expr], env, lambda exprs: printer.evaluate(exprs, env, lambda values: use(printer.narrow(values[0], dtype)))
    )


def beats(combiner: str, value: TirExpr, old: TirExpr, dtype: str) -> TirExpr:
    """True if a later element replaces the best so far: a NaN does, unless that is one."""
    wins = value > old if combiner == "argmax" else value < old
    if not is_float(dtype):
        return wins
    return tir.logical_or(wins, tir.logical_and(is_nan(value, dtype), tir.logical_not(is_nan(old, dtype))))


def element_of(
    printer: Printer,
    builder: Builder,
    domain: Sequence[LoopVar],
    stage: Stage,
    buffer: TirBuffer,
    order: Sequence[LoopVar],
    place: Callable[[Index, tuple[Index, ...]], Index] = lambda row, _: row,
) -> Callable[[Env], Stmt]:
    """Statements that compute and keep one element of a `map` stage. From here on its local is read from `buffer`.

    order: the loops that tell an element's place in the row, outermost first; place: where in `buffer` that is, from the place in the
    row and the element's index over `domain`.
    """
    local = stage.local
    assert local is not None
    positions = {v: d for d, v in enumerate(domain)}

    def offset(index: tuple[Index, ...]) -> Index:
        row = as_index(0)
        for variable in order:
            row = row * variable.extent + index[positions[variable]]
        return place(row, index)

    printer.locals[local] = lambda index: printer.widen(builder.load(buffer, offset(index)), local.dtype)

    def body(env: Env) -> Stmt:
        at = tuple(env.get(v, as_index(0)) for v in domain)
        return computed(printer, stage.value, env, local.dtype, lambda value: builder.store(buffer, offset(at), value))

    return body


class Combiner:
    """The combiner of two partial results of a reduction, on values as locals hold them (bool as uint8)."""

    def __init__(self, name: str, dtype: str, printer: Printer) -> None:
        self.name, self.dtype, self.printer = name, dtype, printer

    @property
    def identity(self) -> TirExpr:
        return tir.const(self._identity(), storage_dtype(self.dtype))

    def _identity(self) -> float | int:
        if self.name in ("sum", "any"):
            return 0
        if self.name in ("prod", "all"):
            return 1
        lowest = self.name == "max"
        if is_float(self.dtype):
            return -math.inf if lowest else math.inf
        if self.dtype == "bool":
            return 0 if lowest else 1
        bits = 8 * tir.itemsize(self.dtype)
        if str(self.dtype).startswith("u"):
            return 0 if lowest else int(2**bits - 1)
        return -int(2 ** (bits - 1)) if lowest else int(2 ** (bits - 1) - 1)

    def __call__(self, a: TirExpr, b: TirExpr) -> TirExpr:
        match self.name:
            case "sum":
                return a + b
            case "prod":
                return a * b
            case "any":
                return tir.maximum(a, b)
            case "all":
                return tir.minimum(a, b)
        if not is_float(self.dtype):
            return tir.maximum(a, b) if self.name == "max" else tir.minimum(a, b)
        # NaN wins: a comparison with NaN is false, so `a` stays where it is one, and `b` must be taken where it is. Whether a new
        # element is NaN is known before the accumulator is: one comparison less between one element and the next.
        beats = b > a if self.name == "max" else b < a
        return tir.select(is_nan(b, self.dtype), b, tir.select(beats, b, a))
