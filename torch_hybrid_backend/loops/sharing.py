"""Common subexpressions: equal parts of expressions become one object, which a printer prints once."""

from __future__ import annotations

from torch_hybrid_backend.loops.ir import Call, Const, Expr, FromIndex, Load


class Sharing:
    """The expressions seen so far, one for each value; they live as long as this object."""

    def __init__(self) -> None:
        self._first: dict[Expr, Expr] = {}
        self._by_key: dict[tuple[object, ...], Expr] = {}

    def of(self, e: Expr) -> Expr:
        """The first expression seen with the same operation and the same operands; its parts are shared, too."""
        if e in self._first:
            return self._first[e]
        match e:
            case Const():
                key: tuple[object, ...] = ("const", e.dtype, repr(e.value))
                shared: Expr = e
            case Load():
                key, shared = ("load", e.buffer, e.index), e
            case FromIndex():
                key, shared = ("index", e.dtype, e.index), e
            case Call():
                args = tuple(self.of(a) for a in e.args)
                key = (e.op, e.dtype, *args)
                shared = e.with_args(args)
            case _:
                raise TypeError(f"not an expression of the loops language: {e!r}")
        found = self._by_key.setdefault(key, shared)
        self._first[e] = self._first[found] = found
        return found
