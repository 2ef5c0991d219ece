"""Bindings: values bound to variables, so that what is used twice is computed, and printed, once."""

from __future__ import annotations

from tvm import tirx

from torch_hybrid_backend.engines.tvm.builder import Builder, Stmt, TirExpr


class Bindings:
    """An ordered list of variables and their values, to be put before a statement or around an expression."""

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

    def around(self, result: TirExpr) -> TirExpr:
        """`result` as an expression of its own, each variable a `Let`."""
        for variable, value in reversed(self._bound):
            result = tirx.Let(variable, value, result)
        return result

    def before(self, statement: Stmt) -> Stmt:
        """`statement` after the statements that bind the variables."""
        return self._builder.seq(*(tirx.stmt.Bind(v, value) for v, value in self._bound), statement)


def _is_held_bool(value: TirExpr) -> bool:
    return isinstance(value, tirx.NE) and isinstance(value.a, tirx.Var) and isinstance(value.b, tirx.IntImm)
