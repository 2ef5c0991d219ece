"""Bindings: values kept in variables, so that what is used twice is computed, and printed, once.

Before a statement a value is kept in a small local array, one element a lane: TVM's passes treat its loads as opaque, where they would
substitute the value of a `Bind` or `Let` at every use (a polynomial of a polynomial then grows exponentially: minutes for a GELU),
and its vectoriser widens stores and loads reliably. LLVM turns such arrays into registers. Inside an expression, where no statement can
stand, a value is a `Let`.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirExpr
from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Expr


class Bindings:
    """Values bound around an expression, each a `Let`."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._bound: list[tuple[TirExpr, TirExpr]] = []

    def let(self, value: TirExpr, dtype: str) -> TirExpr:
        """A variable that holds `value` of `dtype`; the value itself where that is as cheap."""
        if isinstance(value, (tirx.Var, tirx.IntImm, tirx.FloatImm)) or _is_held_bool(value):
            return value
        if dtype == "bool":
            # TVM's vectoriser cannot bind a vector of bool, nor a cast of one; LLVM removes the detour.
            zero, one = tirx.IntImm("uint8", 0), tirx.IntImm("uint8", 1)
            return tirx.NE(self.let(tirx.Select(value, one, zero), "uint8"), zero)
        variable = tirx.Var(self._builder.fresh("v"), dtype)
        self._bound.append((variable, value))
        return variable

    def hoisted(self, compute: Callable[[], TirExpr], dtype: str) -> TirExpr | None:
        """A variable that holds what `compute` gives, the same for every lane; None where there is no vector loop to compute it before."""
        return None

    def around(self, result: TirExpr) -> TirExpr:
        """`result` as an expression of its own."""
        for variable, value in reversed(self._bound):
            result = tirx.Let(variable, value, result)
        return result


class StatementBindings(Bindings):
    """Values bound before a statement, each in a local array of `width` elements indexed by `lane`.

    `allocations` collects the arrays' declarations, and the computation of what is `hoisted`: they belong in front of the vector loop
    around the statement.
    """

    def __init__(self, builder: Builder, lane: Index, width: int, allocations: list[Stmt]) -> None:
        super().__init__(builder)
        self._lane, self._width, self._allocations = lane, width, allocations
        self._stores: list[Stmt] = []
        # What `let` returned: binding it again is free. By identity, for `==` of two makes an expression.
        self._kept: dict[int, TirExpr] = {}
        self._is_hoisting = False

    def let(self, value: TirExpr, dtype: str) -> TirExpr:
        if isinstance(value, (tirx.Var, tirx.IntImm, tirx.FloatImm)) or id(value) in self._kept:
            return value
        if dtype == "bool":
            zero, one = tirx.IntImm("uint8", 0), tirx.IntImm("uint8", 1)
            kept = tirx.NE(self.let(tirx.Select(value, one, zero), "uint8"), zero)
        else:
            lane, width = (as_index(0), 1) if self._is_hoisting else (self._lane, self._width)
            array = self._builder.local(width, dtype, "t")
            self._allocations.append(self._builder.alloc(array))
            place = self._allocations if self._is_hoisting else self._stores
            place.append(self._builder.store(array, lane, value))
            kept = self._builder.load(array, lane)
        self._kept[id(kept)] = kept
        return kept

    def hoisted(self, compute: Callable[[], TirExpr], dtype: str) -> TirExpr | None:
        if self._is_hoisting or self._width == 1:
            return None
        self._is_hoisting = True
        try:
            return self.let(compute(), dtype)
        finally:
            self._is_hoisting = False

    def before(self, statement: Stmt) -> Stmt:
        """`statement` after the statements that compute the values."""
        return self._builder.seq(*self._stores, statement)


class Scope:
    """Values bound so far at one place; a branch of a guard has its own: what it loads is masked."""

    def __init__(self, bindings: Bindings, outer: Scope | None) -> None:
        self.outer = outer
        self.bindings = bindings
        self.known: dict[Expr, TirExpr] = {}  # canonical expression -> variable or literal

    def find(self, key: Expr) -> TirExpr | None:
        if key in self.known:
            return self.known[key]
        return None if self.outer is None else self.outer.find(key)


def _is_held_bool(value: TirExpr) -> bool:
    return isinstance(value, tirx.NE) and isinstance(value.a, tirx.Var) and isinstance(value.b, tirx.IntImm)
