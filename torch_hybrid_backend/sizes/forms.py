"""Conversions of sizes: from sympy's expressions, to text, and from text."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch_hybrid_backend.sizes.size import Atom, Dim, Size, Symbol, function, product, symbol


def from_sympy(expression: Any, symbol_of: Callable[[Any], Size]) -> Dim | None:
    """The size for a sympy expression of torch's symbolic shapes; None if no size expresses it. `symbol_of`: the size for a sympy symbol."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return symbol_of(expression)
    parts = [from_sympy(part, symbol_of) for part in expression.args]
    if any(part is None for part in parts):
        return None
    sizes = [part for part in parts if part is not None]
    name = type(expression).__name__
    if name == "Add":
        total: Dim = 0
        for part in sizes:
            total = total + part
        return total
    if name == "Mul":
        return product(sizes)
    if name == "Pow" and isinstance(sizes[1], int) and sizes[1] >= 0:
        return product([sizes[0]] * sizes[1])
    if name in ("FloorDiv", "CleanDiv"):
        return function("floordiv", sizes[0], sizes[1])
    if name in ("Mod", "PythonMod"):
        return function("mod", sizes[0], sizes[1])
    if name in ("Max", "Min"):
        total = sizes[0]
        for part in sizes[1:]:
            total = function(name.lower(), total, part)
        return total
    return None


def parse(text: str) -> Dim:
    """The size whose `str` is this text, with symbols of the default hint and range. Raises ValueError for other texts."""
    try:
        return _parsed(ast.parse(_FREE_TEXT.sub(lambda m: f"_free({m.group()[1:-1]!r})", text), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no size") from error


# A symbol named by the text of an expression, such as "[u0 + 1]".
_FREE_TEXT = re.compile(r"\[[^\[\]]*\]")
_OPERATORS: Mapping[type[ast.operator], Callable[[Dim, Dim], Dim]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: function("floordiv", a, b),
    ast.Mod: lambda a, b: function("mod", a, b),
}


def _parsed(node: ast.expr) -> Dim:
    match node:
        case ast.Constant(int() as number):
            return number
        case ast.Name(name):
            return symbol(name)
        case ast.UnaryOp(ast.USub(), operand):
            return _parsed(operand) * -1
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_parsed(left), _parsed(right))
        case ast.Call(ast.Name("max" | "min" as name), [left, right]):
            return function(name, _parsed(left), _parsed(right))
        case ast.Call(ast.Name("_free"), [ast.Constant(str() as name)]):
            return symbol(f"[{name}]")
    raise ValueError(f"{ast.unparse(node)!r} is no size")


def render(size: Dim, name: Callable[[Symbol], str]) -> str:
    """Text of a size, with `name` for its symbols. Equal sizes give equal texts."""
    if isinstance(size, int):
        return str(size)

    def atom(a: Atom) -> str:
        return name(a) if isinstance(a, Symbol) else f"{a.name}({render(a.left, name)}, {render(a.right, name)})"

    return " + ".join(
        sorted(
            f"{c}" + "".join(f"*{atom(a)}^{p}" for a, p in sorted(m, key=lambda item: atom(item[0])))
            for m, c in size.terms.items()
        )
    )


def linear(size: Dim | None) -> tuple[str, int, int] | None:
    """(name, factor, offset) if the size is `factor * name + offset` for one symbol; None otherwise."""
    if not isinstance(size, Size):
        return None
    terms = dict(size.terms)
    offset = terms.pop((), 0)
    if len(terms) != 1:
        return None
    (monomial, factor), *_ = terms.items()
    (atom, power), *others = monomial
    if others or power != 1 or not isinstance(atom, Symbol):
        return None
    return atom.name, factor, offset
