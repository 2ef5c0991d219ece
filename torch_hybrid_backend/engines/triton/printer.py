"""Printer: expressions of the loops language as lines of a Triton program, over a tile of points at once.

A tile has dimensions; every value is known with those it varies along (`Value.dims`), so that it broadcasts against the others as Triton
wants it: `[:, None]`-like, or a scalar. Equal subexpressions are printed once.

    printer.variable(rows, Value.along("i", 0))              a variable of the schedule's
    with printer.over(tile, {i: index_of(rows)}, bounds):    the kernel's variables in terms of it
        value = printer.expr(e)                              adds lines, gives what holds the result
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch_hybrid_backend.engines.triton.functions import DTYPES, FUNCTIONS, converted, template
from torch_hybrid_backend.engines.triton.source import Lines
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Mod, Scalar, as_index, compare_ranges
from torch_hybrid_backend.loops.ir import (
    FLOAT8,
    ROUND_TARGETS,
    Buffer,
    Call,
    Const,
    Expr,
    FromIndex,
    Load,
    compute_dtype,
)
from torch_hybrid_backend.loops.kernels import Argument, Store
from torch_hybrid_backend.loops.layout import offset_of
from torch_hybrid_backend.loops.ops import COMPARE, is_float
from torch_hybrid_backend.loops.sharing import Sharing
from torch_hybrid_backend.sizes.size import Dim, Function, Symbol, known_at_most

# `//` and `%` of Triton round towards zero.
_FLOORED = {"floordiv": "floor_divide", "mod": "floor_remainder"}


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a name: a scalar, or a block with the tile's extent along `dims` and 1 along the others."""

    text: str
    dims: frozenset[int] = frozenset()

    @staticmethod
    def along(text: str, *dims: int) -> Value:
        return Value(text, frozenset(dims))


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """The elements that a program computes at once. `blocks`: the names of its extents, dimension by dimension."""

    blocks: tuple[str, ...]

    def shape(self, dims: frozenset[int]) -> str:
        return f"[{', '.join(block if d in dims else '1' for d, block in enumerate(self.blocks))}]"

    def arange(self, dim: int) -> str:
        """0, 1, ... along one dimension."""
        block = self.blocks[dim]
        if len(self.blocks) == 1:
            return f"tl.arange(0, {block})"
        subscripts = ", ".join(":" if d == dim else "None" for d in range(len(self.blocks)))
        return f"tl.arange(0, {block})[{subscripts}]"


class Printer:
    """Prints the expressions of one kernel. Owns the names of its arguments, sizes and functions; `lines` is where it writes.

    `is_wide`: addresses need 64 bits. `locals`: loads of buffers that live in the kernel only. `copied`: tiles that stand for loads, with zeros
    where nothing is; `descriptors`: of tensors that they are copied from, so many each program makes.
    """

    def __init__(
        self, lines: Lines, reads: Sequence[Argument], writes: Sequence[Argument], sizes: Mapping[Symbol, str]
    ) -> None:
        self.lines = lines
        self.functions: set[str] = set()
        self.locals: dict[Buffer, Callable[[tuple[Index, ...]], Value]] = {}
        self.copied: dict[Expr, Value] = {}
        self.descriptors = 0
        self.arguments = arguments = (*reads, *writes)
        self.names = [f"in{i}" for i in range(len(reads))] + [f"out{i}" for i in range(len(writes))]
        self._names = {a.buffer: name for a, name in reversed([*zip(arguments, self.names, strict=True)])}
        self._layouts = {argument.buffer: argument.layout for argument in arguments}
        self._sizes = dict(sizes)
        self.is_wide = any(not known_at_most(a.span, (1 << 31) - 1) and isinstance(a.span, int) for a in arguments)
        self.tile = Tile(())
        self._variables: dict[LoopVar, Value] = {}
        self._env: dict[LoopVar, Index] = {}
        self._bounds: dict[int, Value] = {}
        self._masks: tuple[Value, ...] = ()
        self._known: dict[tuple[Expr, tuple[Value, ...]], Value] = {}
        self._sharing = Sharing()

    # What stands around expressions.

    def name_of(self, buffer: Buffer) -> str:
        """The parameter that has an argument's address."""
        return self._names[buffer]

    def variable(self, variable: LoopVar, value: Value) -> None:
        """A variable of the schedule's: what holds its value."""
        self._variables[variable] = value

    @contextmanager
    def over(self, tile: Tile, env: Mapping[LoopVar, Index], bounds: Mapping[int, Value]) -> Iterator[None]:
        """Expressions inside it are over `tile`. env: the kernel's loop variables over the schedule's. bounds: by dimension of the tile, which
        of its points exist. What was printed outside is not known inside it, nor what is printed inside after it."""
        before = (self.tile, self._env, self._bounds, self._known)
        self.tile, self._env, self._bounds = tile, dict(env), dict(bounds)
        self._known = {}
        try:
            yield
        finally:
            self.tile, self._env, self._bounds, self._known = before

    @contextmanager
    def guarded(self, tests: Sequence[Value]) -> Iterator[None]:
        """Guard the reads inside the block: an element is read where the tests hold, and is 0 elsewhere."""
        before, self._masks = self._masks, (*self._masks, *tests)
        try:
            yield
        finally:
            self._masks = before

    # Sizes and indices.

    def size(self, size: Dim) -> str:
        """A size as text; sizes and integers known only at run time are parameters of the program."""
        if isinstance(size, int):
            return str(size)
        sums = []
        for monomial, coefficient in size.terms.items():
            factors = [self._size_atom(atom) for atom, power in monomial for _ in range(power)]
            sums.append(" * ".join([str(coefficient)] * (coefficient != 1 or not factors) + factors))
        return " + ".join(sums)

    def _size_atom(self, atom: Symbol | Function) -> str:
        if isinstance(atom, Symbol):
            return self._sizes[atom]
        left, right = self.size(atom.left), self.size(atom.right)
        if atom.name in ("max", "min"):
            return f"{atom.name}({left}, {right})"
        if known_at_most(0, atom.left) and known_at_most(0, atom.right):
            return f"(({left}) {'//' if atom.name == 'floordiv' else '%'} ({right}))"
        return f"{self._call(_FLOORED[atom.name])}(({left}) + tl.zeros([], tl.int32), {right})"

    def count(self, symbol: Symbol, text: str) -> None:
        """A size that the program finds out itself, under the symbol's name. It is not negative."""
        self.lines.add(f"{symbol.name} = {text}")
        self._sizes[symbol] = symbol.name

    def let(self, text: str, dims: frozenset[int] = frozenset(), stem: str = "t") -> Value:
        """A name for a value."""
        name = self.lines.name(stem)
        self.lines.add(f"{name} = {text}")
        return Value(name, dims)

    def index(self, index: Index) -> Value:
        """An index over the kernel's variables."""
        return self._index(index.substitute(self._env))

    def _index(self, index: Index) -> Value:
        parts: list[str] = []
        dims: frozenset[int] = frozenset()
        for atom, coefficient in index.terms:
            value = self._atom(atom)
            dims |= value.dims
            parts.append(value.text if coefficient == 1 else f"{value.text} * {self._factor(coefficient)}")
        if index.const != 0 or not parts:
            parts.append(self._factor(index.const))
        return Value(" + ".join(parts), dims)

    def _factor(self, size: Dim) -> str:
        text = self.size(size)
        return text if text.isalnum() else f"({text})"

    def _atom(self, atom: LoopVar | FloorDiv | Mod | Scalar) -> Value:
        match atom:
            case LoopVar():
                return self._variables[atom]
            case Scalar(expr, _, _):
                value = self.expr(expr)
                return Value(f"{value.text}.to({'tl.int64' if self.is_wide else 'tl.int32'})", value.dims)
        inner, divisor = self._index(atom.numerator), self._factor(atom.divisor)
        if known_at_most(0, atom.numerator.low):
            return Value(f"(({inner.text}) {'//' if isinstance(atom, FloorDiv) else '%'} {divisor})", inner.dims)
        name = _FLOORED["floordiv" if isinstance(atom, FloorDiv) else "mod"]
        if not inner.dims:
            inner = self.let(f"({inner.text}) + tl.zeros([], tl.int32)")
        return Value(f"{self._call(name)}({inner.text}, {divisor})", inner.dims)

    def _call(self, name: str) -> str:
        self.functions.add(name)
        return name

    # Expressions.

    def expr(self, e: Expr) -> Value:
        """The value of an expression at every point of the tile, in its compute dtype."""
        e = self._sharing.of(e)
        # What was computed where more points counted serves where fewer do.
        for end in range(len(self._masks), -1, -1):
            if (found := self._known.get((e, self._masks[:end]))) is not None:
                return found
        value = self._print(e)
        self._known[e, self._masks] = value
        return value

    def _print(self, e: Expr) -> Value:
        match e:
            case Const(dtype, number):
                return self.let(f"tl.full([], {literal(number, dtype)}, {DTYPES[dtype][0]})")
            case FromIndex(dtype, index):
                place = self.index(index)
                return self.let(f"({place.text} + tl.zeros([], tl.int32)).to({DTYPES[dtype][0]})", place.dims)
            case Load():
                return self._load(e)
            case Call(_, "guard", _):
                return self._guard(e)
            case Call(_, "round", (x, Const() as target)):
                narrow, operand = ROUND_TARGETS[int(target.value)], self.expr(x)
                return self.widened(self.let(self._converted(operand.text, "float32", narrow), operand.dims), narrow)
            case Call("bool", op, _) if op in COMPARE and (sides := self._sides(e)) is not None:
                known = compare_ranges(op, *sides)
                if known is not None:
                    return self.let(f"tl.full([], {known}, tl.int1)")
                left, right = map(self._index, sides)
                comparison = template(op, "bool", "int32").format(f"({left.text})", f"({right.text})")
                return self.let(comparison, left.dims | right.dims)
            case Call(dtype, "cast", (x,)):
                operand = self.expr(x)
                return self.let(converted(operand.text, x.dtype, dtype), operand.dims)
        assert isinstance(e, Call)
        args = [self.expr(a) for a in e.args]
        text = template(e.op, e.dtype, e.args[0].dtype).format(*(a.text for a in args), type=DTYPES[e.dtype][0])
        self.functions.update(name for name in FUNCTIONS if f"{name}(" in text)
        return self.let(text, frozenset().union(*(a.dims for a in args)))

    def _sides(self, comparison: Call) -> tuple[Index, Index] | None:
        """Both sides of a comparison as indices over the schedule's variables, where they are."""
        sides: list[Index] = []
        for side in comparison.args:
            match side:
                case FromIndex("int64", index):
                    sides.append(index.substitute(self._env))
                case Const("int64", value) if abs(value) < 2**31:
                    sides.append(as_index(int(value)))
                case _:
                    return None
        left, right = sides
        return left, right

    def _guard(self, e: Call) -> Value:
        condition, inside, outside = e.args
        test = self.expr(condition)
        with self.guarded([test]):
            first = self.expr(inside)
        second = self.expr(outside)
        return self.let(f"tl.where({test.text}, {first.text}, {second.text})", test.dims | first.dims | second.dims)

    def _load(self, e: Load) -> Value:
        if e.buffer in self.locals:
            return self.locals[e.buffer](e.index)
        return self.widened(self.raw_load(e), e.buffer.dtype)

    def widened(self, value: Value, dtype: str) -> Value:
        wide = compute_dtype(dtype)
        if wide == dtype:
            return value
        text = (
            f"{self._call(f'from_{dtype}')}({value.text})" if dtype in FLOAT8 else f"{value.text}.to({DTYPES[wide][0]})"
        )
        return self.let(text, value.dims)

    def _converted(self, value: str, source: str, target: str) -> str:
        if target in FLOAT8:
            self._call(f"to_{target}")
        return converted(value, source, target)

    def raw_load(self, e: Load) -> Value:
        """An element as it lies in memory, not widened."""
        if e.buffer.by_value:
            return Value(self._names[e.buffer])
        if (copied := self.copied.get(e)) is not None:
            return self.let(copied.text, copied.dims)
        place = self._offset(e.buffer, e.index)
        mask = self._mask(place.dims)
        place = self._spread(place, place.dims | mask.dims) if mask is not None else place
        masked = "" if mask is None else f", {mask.text}, other=0"
        return self.let(f"tl.load({self._names[e.buffer]} + ({place.text}){masked})", place.dims)

    def _offset(self, buffer: Buffer, index: tuple[Index, ...]) -> Value:
        places = tuple(i.substitute(self._env) for i in index)
        return self._index(offset_of(self._layouts[buffer], buffer.shape, places))

    def _mask(self, dims: frozenset[int]) -> Value | None:
        """The mask of elements that may be read, and vary along `dims`."""
        masks = [mask for dim, mask in self._bounds.items() if dim in dims]
        masks += [mask for mask in self._masks if mask not in masks]
        if not masks:
            return None
        return Value(" & ".join(mask.text for mask in masks), frozenset().union(*(mask.dims for mask in masks)))

    def _spread(self, value: Value, dims: frozenset[int]) -> Value:
        """The same with the tile's extents along `dims`."""
        if dims <= value.dims:
            return value
        return Value(f"{value.text} + tl.zeros({self.tile.shape(dims)}, tl.int32)", value.dims | dims)

    def full(self, value: Value) -> Value:
        """A block with all extents of the tile."""
        everything = frozenset(range(len(self.tile.blocks)))
        if value.dims == everything:
            return value
        return self.let(f"tl.broadcast_to({value.text}, {self.tile.shape(everything)})", everything)

    # Stores.

    def store(self, store: Store) -> None:
        """buffer[index] = value, at every point of the tile that exists."""
        self.put(store.buffer, store.index, self.expr(store.value))

    def combine(self, store: Store, combiner: str) -> None:
        """The same by an atomic operation that combines a point with what its place holds; see `loops.ir.ScatterOp`."""
        value = self.expr(store.value)
        if combiner in ("max", "min") and is_float(store.value.dtype):
            # Atomic operations order floats by their bits: a NaN is beyond all others with this sign.
            bits = "tl.int64" if store.value.dtype == "float64" else "tl.int32"
            nan = f"tl.full([], {'0x7ff8 << 48' if bits == 'tl.int64' else '0x7fc0 << 16'}, {bits})"
            if combiner == "min":
                nan = f"tl.full([], -1, {bits})"
            nan = f"{nan}.to({DTYPES[store.value.dtype][0]}, bitcast=True)"
            value = self.let(f"tl.where({value.text} == {value.text}, {value.text}, {nan})", value.dims)
        self.put(
            store.buffer,
            store.index,
            value,
            {"write": "store", "sum": "atomic_add"}.get(combiner, f"atomic_{combiner}"),
        )

    def put(self, buffer: Buffer, index: tuple[Index, ...], value: Value, how: str = "store") -> None:
        place = self._offset(buffer, index)
        dims = place.dims | value.dims
        mask = self._mask(dims)
        if mask is not None:
            dims |= mask.dims
        place = self._spread(place, dims)
        narrow = self._converted(value.text, compute_dtype(buffer.dtype), buffer.dtype)
        masked = "" if mask is None else f", {mask.text}"
        order = "" if how == "store" else ', sem="relaxed"'
        self.lines.add(f"tl.{how}({self._names[buffer]} + ({place.text}), {narrow}{masked}{order})")


def literal(value: float, dtype: str) -> str:
    """A literal of a compute dtype."""
    if dtype == "bool":
        return str(bool(value))
    if not is_float(dtype):
        return str(int(value))
    text = repr(float(value))
    return text if text[-1].isdigit() else f"float('{text}')"
