"""Index: integer arithmetic on loop variables, simplified as it is built.

An index is a sum `c0 + c1*atom1 + c2*atom2 + ...` with integer coefficients. An atom is a loop variable, a floor division or a
remainder of another index by a positive number, or a scalar read from a tensor (embedding, gather). Every index knows the
inclusive range of its values, which is what lets `(a*8 + b) // 8` become `a` when `0 <= b < 8`. Extents, coefficients and divisors may be
sizes known only at run time (`core.size`); what is simplified holds at every value of theirs for which the element exists.

    >>> i, j = var("i", 4), var("j", 8)
    >>> (i * 8 + j) // 8 == i, (i * 8 + j) % 8 == j
    (True, True)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_hybrid_backend.sizes.size import (
    MAX_SIZE,
    Dim,
    Size,
    UndecidedSizeError,
    divide,
    function,
    known_at_most,
    known_less,
    lower_bound,
    magnitude,
    size_hint,
    symbols,
)

if TYPE_CHECKING:
    from torch_hybrid_backend.loops.ir import Expr


# Bounds of what is not bounded by its form: beyond every number of 64 bits.
_FAR = 1 << 80


@dataclass(frozen=True, slots=True)
class LoopVar:
    """A loop variable with values 0 .. extent-1."""

    name: str
    extent: Dim

    @property
    def range(self) -> tuple[Dim, Dim]:
        return 0, max(self.extent - 1, 0) if isinstance(self.extent, int) else self.extent - 1


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """`numerator // divisor`, rounded towards minus infinity."""

    numerator: Index
    divisor: Dim

    @property
    def range(self) -> tuple[Dim, Dim]:
        low, high, divisor = self.numerator.low, self.numerator.high, self.divisor
        if isinstance(divisor, int) and isinstance(low, int) and isinstance(high, int):
            return low // divisor, high // divisor
        quotient, rest = divide(high, divisor)
        above = quotient - 1 if known_less(rest, 0) else high // divisor
        return (0 if known_at_most(0, low) else -_FAR), above


@dataclass(frozen=True, slots=True)
class Mod:
    """`numerator % divisor`, with the sign of the divisor."""

    numerator: Index
    divisor: Dim

    @property
    def range(self) -> tuple[Dim, Dim]:
        return 0, self.divisor - 1


@dataclass(frozen=True, slots=True)
class Scalar:
    """An integer scalar of the loops language used as an index; its values lie in `low .. high`."""

    expr: Expr
    low: int
    high: Dim

    @property
    def range(self) -> tuple[Dim, Dim]:
        return self.low, self.high


Atom = LoopVar | FloorDiv | Mod | Scalar


class Index:
    """An immutable sum of atoms; `low` and `high` bound its values, both included."""

    # Most are an intermediate sum whose bounds and hash nobody asks for: both are found when first wanted.
    __slots__ = ("_bounds", "_hash", "const", "terms")

    def __init__(self, terms: tuple[tuple[Atom, Dim], ...], const: Dim) -> None:
        self.terms = terms
        self.const = const
        self._bounds: tuple[Dim, Dim] | None = None
        self._hash: int | None = None

    @property
    def low(self) -> Dim:
        return (self._bounds or self._find_bounds())[0]

    @property
    def high(self) -> Dim:
        return (self._bounds or self._find_bounds())[1]

    def _find_bounds(self) -> tuple[Dim, Dim]:
        low = high = self.const
        for atom, coefficient in self.terms:
            first, last = atom.range
            if isinstance(coefficient, int):
                is_positive = coefficient > 0
            elif known_at_most(0, coefficient):
                is_positive = True
            else:
                low, high = low - _FAR, high + _FAR
                continue
            low += coefficient * (first if is_positive else last)
            high += coefficient * (last if is_positive else first)
        self._bounds = low, high
        return self._bounds

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | Size):
            return self.is_const and self.const == other
        if not isinstance(other, Index) or len(self.terms) != len(other.terms) or self.const != other.const:
            return False
        return self.terms == other.terms or frozenset(self.terms) == frozenset(other.terms)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((frozenset(self.terms), self.const))
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Made anew when unpickled: hashes of names differ between processes.
        return Index, (self.terms, self.const)

    @property
    def is_const(self) -> bool:
        return not self.terms

    def __add__(self, other: Index | Dim) -> Index:
        # Kernels are emitted by millions of sums, most of them with a number.
        if not isinstance(other, Index):
            return self if other == 0 else Index(self.terms, self.const + other)
        if not other.terms:
            return self if other.const == 0 else Index(self.terms, self.const + other.const)
        if not self.terms:
            return other if self.const == 0 else Index(other.terms, self.const + other.const)
        total = dict(self.terms)
        for atom, coefficient in other.terms:
            total[atom] = total.get(atom, 0) + coefficient
        return _merge_split(Index(tuple((a, c) for a, c in total.items() if c != 0), self.const + other.const))

    __radd__ = __add__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Index | Dim) -> Index:
        return self + as_index(other) * -1

    def __rsub__(self, other: Dim) -> Index:
        return as_index(other) + self * -1

    def __mul__(self, factor: Dim) -> Index:
        if factor == 0:
            return as_index(0)
        if factor == 1:
            return self
        return Index(tuple((a, c * factor) for a, c in self.terms), self.const * factor)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: Dim) -> Index:
        if isinstance(divisor, int) and divisor <= 0:
            raise ValueError(f"an index is divided by positive numbers only, got {divisor}")
        quotient, rest = self._split(divisor)
        if (whole := _only_quotient(rest, divisor)) is not None:
            return quotient + whole
        coarse, _, grain = rest._coarsen(divisor)
        if grain != 1:
            return quotient + coarse // (divisor // grain)
        if len(rest.terms) == 1 and rest.const == 0:
            atom, coefficient = rest.terms[0]
            if isinstance(atom, FloorDiv) and coefficient == 1:
                return quotient + atom.numerator // (atom.divisor * divisor)
        return quotient + Index(((FloorDiv(rest, divisor), 1),), 0)

    def __mod__(self, divisor: Dim) -> Index:
        if isinstance(divisor, int) and divisor <= 0:
            raise ValueError(f"an index is divided by positive numbers only, got {divisor}")
        _, rest = self._split(divisor)
        if (whole := _only_quotient(rest, divisor)) is not None:
            return rest - divisor * whole
        coarse, fine, grain = rest._coarsen(divisor)
        if grain != 1:
            return coarse % (divisor // grain) * grain + fine
        if len(rest.terms) == 1 and rest.const == 0:
            atom, coefficient = rest.terms[0]
            if isinstance(atom, Mod) and coefficient == 1 and divide(atom.divisor, divisor)[1] == 0:
                return atom.numerator % divisor
        return Index(((Mod(rest, divisor), 1),), 0)

    def _split(self, divisor: Dim) -> tuple[Index, Index]:
        """`self == quotient * divisor + rest`, with every term whose coefficient divides moved to the quotient."""
        divisible, rest = [], []
        for atom, coefficient in self.terms:
            times, left = divide(coefficient, divisor)
            if left == 0:
                divisible.append((atom, times))
            else:
                rest.append((atom, coefficient))
        whole, remaining = divide(self.const, divisor)
        return Index(tuple(divisible), whole), Index(tuple(rest), remaining)

    def _coarsen(self, divisor: Dim) -> tuple[Index, Index, Dim]:
        """`self == coarse * grain + fine` with `0 <= fine < grain`, for the largest such grain that divides `divisor`.

        Then `self // divisor == coarse // (divisor // grain)`: the part below the grain, such as a vector's elements, drops out of divisions.
        (self, 0, 1) if there is no such grain.
        """
        for grain in sorted({_common(c, divisor) for _, c in self.terms}, key=size_hint, reverse=True):
            if grain == 1:
                continue
            coarse, fine = self._split(grain)
            if known_at_most(0, fine.low) and known_less(fine.high, grain):
                return coarse, fine, grain
        return self, as_index(0), 1

    def coarse_bound(self, bound: Dim) -> tuple[Index, Index]:
        """(index, limit) with `index < limit` exactly where `self < bound`, without the fine part, which cannot change the answer."""
        coarse, _, grain = self._coarsen(bound)
        return coarse, as_index(bound // grain)

    def substitute(self, values: dict[LoopVar, Index]) -> Index:
        """The index with loop variables replaced, simplified again. Scalars are kept: see `ir.substitute`."""
        result = as_index(self.const)
        for atom, coefficient in self.terms:
            match atom:
                case LoopVar():
                    part = values.get(atom) or Index(((atom, 1),), 0)
                case FloorDiv(numerator, divisor):
                    part = numerator.substitute(values) // divisor
                case Mod(numerator, divisor):
                    part = numerator.substitute(values) % divisor
                case _:
                    part = Index(((atom, 1),), 0)
            result = result + part * coefficient
        return result

    def leaves(self) -> Iterator[LoopVar | Scalar]:
        """The loop variables and scalars that the index is computed from; one that occurs twice comes twice."""
        for atom, _ in self.terms:
            if isinstance(atom, FloorDiv | Mod):
                yield from atom.numerator.leaves()
            else:
                yield atom

    def divides(self, variable: LoopVar) -> bool:
        """True if the index holds a quotient or a remainder whose operand depends on `variable`."""
        return any(variable in atom.numerator.leaves() for atom, _ in self.terms if isinstance(atom, FloorDiv | Mod))

    def __repr__(self) -> str:
        def show(atom: Atom) -> str:
            match atom:
                case LoopVar(name, _):
                    return name
                case FloorDiv(numerator, divisor):
                    return f"({numerator!r} // {_factor(divisor)})"
                case Mod(numerator, divisor):
                    return f"({numerator!r} % {_factor(divisor)})"
            return f"[{atom.expr!r}]"

        parts = [show(a) if c == 1 else f"{show(a)}*{_factor(c)}" for a, c in self.terms]
        if self.const != 0 or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)


def _factor(size: Dim) -> str:
    return str(size) if isinstance(size, int) else f"({size})"


def _only_quotient(rest: Index, divisor: Dim) -> Dim | None:
    """The value of `rest // divisor`, if it is the same at every point."""
    low, high = rest.low, rest.high
    if isinstance(divisor, int) and isinstance(low, int) and isinstance(high, int):
        return low // divisor if low // divisor == high // divisor else None
    return 0 if known_at_most(0, low) and known_less(high, divisor) else None


def _common(coefficient: Dim, divisor: Dim) -> Dim:
    """A common divisor: the greatest of numbers; of sizes the coefficient itself, where it divides."""
    if isinstance(coefficient, int) and isinstance(divisor, int):
        return math.gcd(coefficient, divisor)
    if isinstance(coefficient, int) and isinstance(divisor, Size):
        return math.gcd(coefficient, *divisor.terms.values())
    return coefficient if divide(divisor, coefficient)[1] == 0 and coefficient != divisor else 1


def _merge_split(index: Index) -> Index:
    """`x//d*d + x%d` is x: undo a split that turned out not to be needed."""
    for atom, coefficient in index.terms if len(index.terms) > 1 else ():
        if not isinstance(atom, Mod):
            continue
        step = atom.divisor * coefficient
        if isinstance(step, int) and all(a is atom or (isinstance(c, int) and c % step) for a, c in index.terms):
            continue  # no other term is `step` times anything
        # `x // d` may itself have been simplified to a sum: compare by value, not by atom.
        whole = (atom.numerator // atom.divisor) * step
        if not whole.terms:
            continue
        terms = dict(index.terms)
        if all(terms.get(a) == c for a, c in whole.terms):
            for a, _ in whole.terms:
                del terms[a]
            del terms[atom]
            rest = Index(tuple(terms.items()), index.const - whole.const)
            return rest + atom.numerator * coefficient
    return index


def as_index(value: Index | Dim) -> Index:
    """A number or a size as an index."""
    if isinstance(value, Index):
        return value
    return Index((), value if isinstance(value, Size) else int(value))


def index_of(variable: LoopVar) -> Index:
    """A loop variable as an index; a loop of one iteration is the constant 0."""
    return as_index(0) if variable.extent == 1 else Index(((variable, 1),), 0)


def var(name: str, extent: Dim) -> Index:
    """A fresh loop variable as an index: see `index_of`."""
    return index_of(LoopVar(name, extent))


def reach(index: Index) -> Dim:
    """Bound of the absolute values of an index and of all intermediate results of its computation."""
    total = magnitude(index.const)
    for atom, coefficient in index.terms:
        total = total + magnitude(coefficient) * _reach_of_atom(atom)
    return total


def _reach_of_atom(atom: Atom) -> Dim:
    if isinstance(atom, FloorDiv | Mod):
        return function("max", reach(atom.numerator), magnitude(atom.divisor))
    low, high = atom.range
    return function("max", magnitude(low), magnitude(high))


def is_wide(index: Index) -> bool:
    """True if an index that is used as a number is computed in 64 bits: it holds an unbounded integer, or numbers too large for 32 bits.

    Any other is computed in 32 bits. If it holds sizes known only at run time, its `reach` tells for which sizes 32 bits suffice.
    """
    most = reach(index)
    return lower_bound(most) > MAX_SIZE or any(s.is_wide for s in symbols([most]))


def linear(index: tuple[Index, ...], strides: tuple[Dim, ...]) -> Index:
    """The offset of `index` in a tensor with `strides` (elements)."""
    total = as_index(0)
    for position, stride in zip(index, strides, strict=True):
        total = total + position * stride
    return total


def contiguous_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Row-major strides, in elements."""
    strides: list[Dim] = []
    step: Dim = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return tuple(reversed(strides))


def reshape_index(index: tuple[Index, ...], source: tuple[Dim, ...], target: tuple[Dim, ...]) -> tuple[Index, ...]:
    """Index in shape `source` of the element at `index` of a row-major tensor of shape `target` (same element count).

    Works group by group (runs of dimensions with equal products), so that only dimensions which really split or merge divide.
    Raises UndecidedSizeError where the counts are sizes that are not known to be equal.
    """
    result: list[Index] = []
    s = t = 0
    while s < len(source) or t < len(target):
        s_end, t_end = s, t
        left: Dim = 1
        right: Dim = 1
        if s < len(source):
            left, s_end = source[s], s + 1
        if t < len(target):
            right, t_end = target[t], t + 1
        while left != right:
            # Which side is to grow is a guess where sizes are symbolic; that they are equal in the end is not.
            if size_hint(left) < size_hint(right) and s_end < len(source):
                left, s_end = left * source[s_end], s_end + 1
            elif t_end < len(target):
                right, t_end = right * target[t_end], t_end + 1
            elif s_end < len(source):
                left, s_end = left * source[s_end], s_end + 1
            else:
                raise UndecidedSizeError(f"shapes {source} and {target} are not known to have as many elements")
        offset = linear(index[t:t_end], contiguous_strides(target[t:t_end]))
        for size, stride in zip(source[s:s_end], contiguous_strides(source[s:s_end]), strict=True):
            result.append(offset // stride % size if size != 1 else as_index(0))
        s, t = s_end, t_end
    return tuple(result)


def compare_ranges(op: str, a: Index, b: Index) -> bool | None:
    """Result of the comparison `op` ("lt", "le", "gt", "ge", "eq", "ne") for all values of two indices, if always the same."""
    if op in ("gt", "ge"):
        return compare_ranges("lt" if op == "gt" else "le", b, a)
    difference = a - b
    low, high = difference.low, difference.high
    is_below, is_above = known_less(high, 0), known_less(0, low)
    match op:
        case "lt":
            return True if is_below else False if known_at_most(0, low) else None
        case "le":
            return True if known_at_most(high, 0) else False if is_above else None
        case "eq":
            return True if low == high == 0 else False if is_below or is_above else None
    equal = compare_ranges("eq", a, b)
    return None if equal is None else not equal
