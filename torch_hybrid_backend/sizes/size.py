"""Size: an integer that is only known at run time, as arithmetic on the symbols of a graph's shapes.

A size is a polynomial over atoms with integer coefficients. An atom is a symbol, or a quotient, remainder, maximum or minimum of two sizes. A
symbol (`s0`) is a dimension of a tensor, or an integer argument of a program. Constants are plain `int`s: a `Size` always depends on a symbol.
Each symbol has a range: a dimension is never negative, an integer argument may be any of 64 bits.

A comparison answers if the answer is the same for all values of the symbols, and raises `UndecidedSizeError` otherwise. `==` compares the
polynomials: equal sizes are equal at all values, and unequal sizes differ at some value.

    >>> s = symbol("s0", 7)
    >>> (s * 4 + 8) // 4, (s * 4) % 4, size_hint(s * 12), s + 1 > 0
    (s0 + 2, 0, 84, True)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# The largest dimension, and the most elements, of tensors that kernels address by int32 indices.
MAX_SIZE = (1 << 31) - 1
# The largest integer argument of a program.
MAX_INTEGER = (1 << 63) - 1


class UndecidedSizeError(Exception):
    """The answer to a question about a size depends on the values of its symbols."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size symbol. `hint`: a typical value, that of the example inputs, for choices that only affect speed. `low`, `high`: the least and the
    largest value, by default those of a dimension. Symbols of the same name are equal: names are unique in a graph."""

    name: str
    hint: int = field(default=128, compare=False)
    low: int = field(default=0, compare=False)
    high: int = field(default=MAX_SIZE, compare=False)

    @property
    def is_wide(self) -> bool:
        """True if a value may need more than 32 bits, as that of an integer argument; dimensions fit."""
        return not -MAX_SIZE <= self.low <= self.high <= MAX_SIZE


@dataclass(frozen=True, slots=True)
class Function:
    """Function of two sizes. `name`: "floordiv", "mod" (both round as in Python), "max" or "min"."""

    name: str
    left: Dim
    right: Dim


Atom = Symbol | Function
Monomial = tuple[tuple[Atom, int], ...]  # (atom, power), sorted by text

_EVALUATE: Mapping[str, Callable[[int, int], int]] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
}


class Size:
    """A sum of monomials. `terms`: monomial -> coefficient. Immutable and hashable."""

    __slots__ = ("_hash", "_text", "terms", "traits")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        # Sorted, so that texts and choices do not depend on the order of operations.
        self.terms = dict(terms) if len(terms) == 1 else dict(sorted(terms.items(), key=lambda item: _order(item[0])))
        self._hash = hash(frozenset(self.terms.items()))
        self._text = ""
        # Hints and ranges of the symbols. Equal sizes may differ in these, as two graphs may each have an s0.
        self.traits: tuple[int, ...] = tuple(
            trait for monomial in self.terms for atom, _ in monomial for trait in _traits(atom)
        )

    # Arithmetic: a result is a plain int if no symbol is left.

    def __add__(self, other: Dim) -> Dim:
        return _sum(self, other) if isinstance(other, int | Size) else NotImplemented  # type: ignore[no-any-return]

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + other * -1

    def __rsub__(self, other: Dim) -> Dim:
        return self * -1 + other

    def __mul__(self, other: Dim) -> Dim:
        return _times(self, other) if isinstance(other, int | Size) else NotImplemented  # type: ignore[no-any-return]

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        quotient, rest = divide(self, other)
        if rest == 0 or (known_at_most(0, rest) and known_less(rest, other)):
            return quotient
        return quotient + _atom(_merged(rest, other))

    def __rfloordiv__(self, other: Dim) -> Dim:
        return 0 if other == 0 else _atom(Function("floordiv", other, self))

    def __mod__(self, other: Dim) -> Dim:
        _, rest = divide(self, other)
        if rest == 0 or (known_at_most(0, rest) and known_less(rest, other)):
            return rest
        return _atom(Function("mod", rest, other))

    def __rmod__(self, other: Dim) -> Dim:
        return 0 if other == 0 else _atom(Function("mod", other, self))

    # Comparisons.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self._hash == other._hash and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __lt__(self, other: Dim) -> bool:
        return _compare(self, other, strict=True)

    def __le__(self, other: Dim) -> bool:
        return _compare(self, other, strict=False)

    def __gt__(self, other: Dim) -> bool:
        return _compare(other, self, strict=True)

    def __ge__(self, other: Dim) -> bool:
        return _compare(other, self, strict=False)

    def __bool__(self) -> bool:
        low, high = interval(self)
        if low > 0 or high < 0:
            return True
        raise UndecidedSizeError(f"whether {self} is zero is only known at run time")

    def __int__(self) -> int:
        raise UndecidedSizeError(f"{self} is only known at run time")

    __index__ = __int__

    def __float__(self) -> float:
        raise UndecidedSizeError(f"{self} is only known at run time")

    def __truediv__(self, other: object) -> float:
        raise UndecidedSizeError(f"{self} / {other} is only known at run time")

    __rtruediv__ = __pow__ = __rpow__ = __truediv__

    def __repr__(self) -> str:
        if not self._text:
            self._text = " + ".join(_show(m, c) for m, c in self.terms.items())
        return self._text

    def __reduce__(self) -> tuple[object, ...]:
        return Size, (self.terms,)  # hashes of names differ between processes


# An int, or a size that is only known at run time.
Dim = int | Size
Interval = tuple[int, int]


def symbol(name: str, hint: int = 128, low: int = 0, high: int = MAX_SIZE) -> Size:
    """The size that consists of one new symbol."""
    return _atom(Symbol(name, hint, low, high))


def as_size(symbol: Symbol) -> Size:
    """The size that consists of this symbol."""
    return _atom(symbol)


def function(name: str, left: Dim, right: Dim) -> Dim:
    """floordiv, mod, max or min of two sizes, simplified if possible."""
    if isinstance(left, int) and isinstance(right, int):
        return _EVALUATE[name](left, right)
    if name == "floordiv":
        return left // right
    if name == "mod":
        return left % right
    if left == right or known_at_most(right, left):
        return left if name == "max" else right
    if known_at_most(left, right):
        return right if name == "max" else left
    return _atom(Function(name, left, right))


def evaluate(size: Dim, values: Mapping[str, int]) -> int:
    """The value of a size. `values`: symbol name -> value. Divisions by 0 give 0."""
    return _evaluate(size, lambda s: values[s.name])


def size_hint(size: Dim) -> int:
    """A typical value of a size, that for the example inputs. Use this value for choices that affect speed, never results."""
    return _evaluate(size, lambda s: s.hint)


def known_int(size: Dim) -> int:
    """The size as an int. Raises UndecidedSizeError if the size is only known at run time."""
    return size if isinstance(size, int) else int(size)


def symbols(sizes: Iterable[Dim]) -> list[Symbol]:
    """The symbols that sizes depend on, each once, in order of first use."""
    found: dict[Symbol, None] = {}
    for size in sizes:
        for atom in _atoms(size):
            if isinstance(atom, Symbol):
                found[atom] = None
    return list(found)


def interval(size: Dim) -> Interval:
    """Lower and upper bound of a size, from its form and the ranges of its symbols. The bounds may be wider than the values."""
    if isinstance(size, int):
        return size, size
    found: Interval = _interval(size)
    return found


def lower_bound(size: Dim) -> int:
    """Lower bound of a size; see `interval`."""
    return interval(size)[0]


def magnitude(size: Dim) -> Dim:
    """Upper bound of the absolute values of a size and of all intermediate results when it is computed."""
    if isinstance(size, int):
        return abs(size)
    monomials = [
        product([abs(c), *(_magnitude(atom) for atom, p in m for _ in range(p))]) for m, c in size.terms.items()
    ]
    return functools.reduce(lambda a, b: a + b, monomials)


def known_less(a: Dim, b: Dim) -> bool:
    """True if a < b is known to hold for all values of the symbols."""
    return a < b if isinstance(a, int) and isinstance(b, int) else lower_bound(b - a) >= 1


def known_at_most(a: Dim, b: Dim) -> bool:
    """True if a <= b is known to hold for all values of the symbols."""
    return a <= b if isinstance(a, int) and isinstance(b, int) else lower_bound(b - a) >= 0


def product(sizes: Iterable[Dim]) -> Dim:
    """The product of sizes; 1 if there are none."""
    total: Dim = 1
    for size in sizes:
        total = total * size
    return total


def ceil_div(a: Dim, b: Dim) -> Dim:
    """a / b, rounded up."""
    return (a + b - 1) // b


def _cached(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of sizes, by the sizes and their traits: schedules ask the same few questions thousands of times."""
    cached = functools.lru_cache(maxsize=1 << 14)(lambda traits, *sizes: fn(*sizes))
    return lambda *sizes: cached(tuple(size.traits if isinstance(size, Size) else () for size in sizes), *sizes)


def divide(size: Dim, divisor: Dim) -> tuple[Dim, Dim]:
    """(quotient, rest) with `size == quotient * divisor + rest`. The quotient has the terms that `divisor` divides."""
    if isinstance(size, int) and isinstance(divisor, int):
        return divmod(size, divisor)
    found: tuple[Dim, Dim] = _divide(size, divisor)
    return found


@_cached
def _divide(size: Dim, divisor: Dim) -> tuple[Dim, Dim]:
    if isinstance(divisor, int):
        quotient = {m: c // divisor for m, c in _terms(size) if m and c % divisor == 0}
        rest = {m: c for m, c in _terms(size) if m and c % divisor}
        constant = dict(_terms(size)).get((), 0)
        quotient[()], rest[()] = constant // divisor, constant % divisor
        return _from_terms(quotient), _from_terms(rest)
    if len(divisor.terms) == 1:
        (by, factor), *_ = divisor.terms.items()
        parts = [(m, c, _quotient(m, by)) for m, c in _terms(size)]
        taken = {q: c // factor for _, c, q in parts if q is not None and c % factor == 0}
        left = {m: c for m, c, q in parts if q is None or c % factor}
        return _from_terms(taken), _from_terms(left)
    # Several terms: polynomial long division by the leading term. If a rest is left, nothing is divided.
    (lead, factor), *_ = divisor.terms.items()
    whole: Dim = 0
    rest_of: Dim = size
    for _ in range(len(dict(_terms(size)))):
        found = next(
            ((c // factor, q) for m, c in _terms(rest_of) if c % factor == 0 and (q := _quotient(m, lead)) is not None),
            None,
        )
        if found is None:
            break
        step = _from_terms({found[1]: found[0]})
        whole, rest_of = whole + step, rest_of - step * divisor
        if isinstance(rest_of, int):
            break
    return (whole, 0) if rest_of == 0 else (0, size)


@_cached
def _sum(a: Size, b: Dim) -> Dim:
    total = dict(a.terms)
    for monomial, coefficient in _terms(b):
        total[monomial] = total.get(monomial, 0) + coefficient
    return _from_terms(total)


@_cached
def _times(a: Size, b: Dim) -> Dim:
    total: dict[Monomial, int] = {}
    for left, x in a.terms.items():
        for right, y in _terms(b):
            monomial = _product(left, right)
            total[monomial] = total.get(monomial, 0) + x * y
    return _from_terms(total)


@_cached
def _interval(size: Size) -> Interval:
    low = high = 0
    for monomial, coefficient in size.terms.items():
        least = most = coefficient
        for atom, power in monomial:
            for first, last in [_atom_interval(atom)] * power:
                ends = least * first, least * last, most * first, most * last
                least, most = min(ends), max(ends)
        low, high = low + least, high + most
    return low, high


def _terms(size: Dim) -> Iterable[tuple[Monomial, int]]:
    return size.terms.items() if isinstance(size, Size) else [((), size)]


def _from_terms(terms: Mapping[Monomial, int]) -> Dim:
    left = {m: c for m, c in terms.items() if c}
    if not left:
        return 0
    if len(left) == 1 and () in left:
        return left[()]
    return Size(left)


def _atom(atom: Atom) -> Size:
    return Size({((atom, 1),): 1})


def _merged(size: Dim, divisor: Dim) -> Function:
    """The quotient of a size, as one division where it is (x // a + c) // b: the sizes of images behind several strides are so compared."""
    if isinstance(size, Size) and isinstance(divisor, int) and divisor > 0:
        terms = dict(size.terms)
        constant = terms.pop((), 0)
        if len(terms) == 1:
            (monomial, coefficient), *_ = terms.items()
            (atom, power), *others = monomial
            if isinstance(atom, Function) and atom.name == "floordiv" and (coefficient, power, others) == (1, 1, []):
                by = atom.right
                if isinstance(by, int) and by > 0:
                    return Function("floordiv", atom.left + constant * by, by * divisor)
    return Function("floordiv", size, divisor)


def _product(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: repr(item[0])))


def _quotient(monomial: Monomial, by: Monomial) -> Monomial | None:
    powers = dict(monomial)
    for atom, power in by:
        if powers.get(atom, 0) < power:
            return None
        powers[atom] -= power
    return tuple((atom, power) for atom, power in powers.items() if power)


def _compare(a: Dim, b: Dim, *, strict: bool) -> bool:
    """a < b, or a <= b if not `strict`. Raises UndecidedSizeError if the answer depends on the values of the symbols."""
    if not isinstance(a, int | Size) or not isinstance(b, int | Size):
        raise TypeError(f"a size cannot be compared with a {type(b if isinstance(a, Size) else a).__name__}")
    difference, opposite = b - a, a - b
    if lower_bound(difference) >= (1 if strict else 0):
        return True
    if lower_bound(opposite) >= (0 if strict else 1):
        return False
    raise UndecidedSizeError(f"whether {a} {'<' if strict else '<='} {b} is only known at run time")


def _traits(atom: Atom) -> tuple[int, ...]:
    if isinstance(atom, Symbol):
        return atom.hint, atom.low, atom.high
    return tuple(trait for side in (atom.left, atom.right) if isinstance(side, Size) for trait in side.traits)


def _atom_interval(atom: Atom) -> Interval:
    if isinstance(atom, Symbol):
        return atom.low, atom.high
    left, right = interval(atom.left), interval(atom.right)
    if atom.name in ("max", "min"):
        choose = _EVALUATE[atom.name]
        return choose(left[0], right[0]), choose(left[1], right[1])
    # Divisions by 0 give 0, as in `evaluate`.
    if atom.name == "floordiv":
        if right[0] > 0:
            return left[0] // right[left[0] > 0], left[1] // right[left[1] < 0]
        return (0 if left[0] >= 0 and right[0] >= 0 else -max(map(abs, left))), max(map(abs, left))
    return min(right[0] + 1, 0), max(right[1] - 1, 0)


def _magnitude(atom: Atom) -> Dim:
    if isinstance(atom, Symbol):
        return as_size(atom) if atom.low >= 0 else max(-atom.low, atom.high)
    return function("max", magnitude(atom.left), magnitude(atom.right))


def _evaluate(size: Dim, value: Callable[[Symbol], int]) -> int:
    return sum(c * math.prod(_evaluate_atom(atom, value) ** power for atom, power in m) for m, c in _terms(size))


def _evaluate_atom(atom: Atom, value: Callable[[Symbol], int]) -> int:
    if isinstance(atom, Symbol):
        return value(atom)
    left, right = _evaluate(atom.left, value), _evaluate(atom.right, value)
    if right == 0 and atom.name in ("floordiv", "mod"):
        return 0  # no element's index divides by an empty dimension
    return _EVALUATE[atom.name](left, right)


def _atoms(size: Dim) -> Iterator[Atom]:
    for monomial, _ in _terms(size):
        for atom, _ in monomial:
            if isinstance(atom, Function):
                yield from _atoms(atom.left)
                yield from _atoms(atom.right)
            yield atom


def _order(monomial: Monomial) -> tuple[bool, str]:
    return not monomial, "*".join(f"{_name(atom)}^{power}" for atom, power in monomial)


def _name(atom: Atom) -> str:
    if isinstance(atom, Symbol):
        return atom.name
    sign = {"floordiv": "//", "mod": "%"}.get(atom.name)
    if sign:
        return f"(({atom.left}) {sign} ({atom.right}))"
    return f"{atom.name}({atom.left}, {atom.right})"


def _show(monomial: Monomial, coefficient: int) -> str:
    factors = [_name(atom) for atom, power in monomial for _ in range(power)]
    if coefficient != 1 or not factors:
        factors.insert(0, str(coefficient))
    return "*".join(factors)
