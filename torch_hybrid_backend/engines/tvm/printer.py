"""Printer: expressions of the loops language as TIR.

An expression is a graph with shared parts; TVM sees trees. So every value used twice is bound to a variable: as `Bind` statements before a
store, or as a chain of `Let`s in an expression. Equal subexpressions (same operation, same operands) are found first, shared or not.

    printer = Printer(builder, {id(x): (x_array, layout, x)})
    body = builder.loop(16, lambda i: printer.store(store, {store_var: i}), "vectorized")

Arrays hold bool as uint8; every other dtype as itself. bfloat16 and float16 are widened to float32 at loads and rounded to nearest even at
stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx

from torch_hybrid_backend.engines.tvm import arithmetic
from torch_hybrid_backend.engines.tvm.bindings import Bindings
from torch_hybrid_backend.engines.tvm.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Mod, Scalar, as_index
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, FromIndex, Load, compute_dtype
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.loops.layout import Layout, offset_of
from torch_hybrid_backend.loops.ops import COMPARE, ROUND_TARGETS

Env = Mapping[LoopVar, Index]
_COMPARISONS = {"eq": tirx.EQ, "ne": tirx.NE, "lt": tirx.LT, "le": tirx.LE, "gt": tirx.GT, "ge": tirx.GE}
# The value of a kernel-local buffer at a logical index (over schedule indices).
LocalLoad = Callable[[tuple[Index, ...]], TirExpr]


def storage_dtype(dtype: str) -> str:
    """The dtype of the array that holds a tensor's elements."""
    return "uint8" if dtype == "bool" else dtype


def narrow(value: TirExpr, dtype: str) -> TirExpr:
    """A scalar of the compute dtype of `dtype` as the array stores it."""
    if dtype == "bool":
        return tirx.Select(value, tirx.IntImm("uint8", 1), tirx.IntImm("uint8", 0))
    return value if compute_dtype(dtype) == dtype else tirx.Cast(dtype, value)


def widen(value: TirExpr, dtype: str) -> TirExpr:
    """What the array holds as a scalar of the compute dtype of `dtype`."""
    if dtype == "bool":
        return tirx.NE(value, tirx.IntImm("uint8", 0))
    return value if compute_dtype(dtype) == dtype else tirx.Cast(compute_dtype(dtype), value)


class _Scope:
    """Values bound so far at one place; a branch of a guard has its own, as it may not run."""

    def __init__(self, builder: Builder, outer: _Scope | None) -> None:
        self.outer = outer
        self.bindings = Bindings(builder)
        self.known: dict[int, TirExpr] = {}  # canonical expression -> variable or literal

    def find(self, key: int) -> TirExpr | None:
        scope: _Scope | None = self
        while scope is not None:
            if key in scope.known:
                return scope.known[key]
            scope = scope.outer
        return None


class Printer:
    """Prints the expressions of one kernel.

    `arguments` maps the id of each buffer in memory to its array, its layout and itself. `locals` overrides loads of kernel-local
    buffers (accumulators, row scalars). `lanes` names the schedule's vector loop variables: a guard that depends on one is computed for all
    lanes, with its loads moved inside their buffers, because a branch would make TVM split the vector.
    """

    def __init__(self, builder: Builder, arguments: Mapping[int, tuple[TirBuffer, Layout, Buffer]]) -> None:
        self.builder = builder
        self.arguments = arguments
        self.locals: dict[int, LocalLoad] = {}
        self.lanes: set[LoopVar] = set()
        self._env: dict[LoopVar, Index] = {}
        self._scope: _Scope | None = None
        self._canonical: dict[int, Expr] = {}
        self._by_key: dict[tuple[object, ...], Expr] = {}
        self._kept: list[Expr] = []  # keeps ids alive
        self._uses: dict[int, int] = {}
        self._masks: list[TirExpr] = []
        builder.print_scalar = self._print_scalar

    # Public: expressions and stores.

    def expr(self, e: Expr, env: Env) -> TirExpr:
        """One TIR expression, self-contained (values used twice are `Let`s); `env` gives the kernel's loop variables."""
        with self._printing([e], env) as (roots, scope):
            result = self._print(roots[0])
            return scope.bindings.around(result)

    def evaluate(self, exprs: Sequence[Expr], env: Env, use: Callable[[list[TirExpr]], Stmt]) -> Stmt:
        """Bind what the expressions share, then `use` their values (each may be used many times) in a statement."""
        with self._printing(exprs, env) as (roots, scope):
            values = [self._bind(self._print(root), root.dtype) for root in roots]
            statement = use(values)
            return scope.bindings.before(statement)

    def store(self, store: Store, env: Env) -> Stmt:
        """buffer[index] = value."""
        return self.stores([store], env)

    def stores(self, stores: Sequence[Store], env: Env) -> Stmt:
        """Several stores at one point; what their values share is computed once."""
        targets = [self._target(store, env) for store in stores]
        if any(self.splits(store.value, env) for store in stores):
            # TVM splits statement by statement, and cannot split the bindings before it.
            self._env = dict(env)
            values = [self.expr(store.value, env) for store in stores]
            return self.builder.seq(*(self._put(t, s, v) for t, s, v in zip(targets, stores, values, strict=True)))
        return self.evaluate(
            [store.value for store in stores],
            env,
            lambda values: self.builder.seq(
                *(self._put(t, s, v) for t, s, v in zip(targets, stores, values, strict=True))
            ),
        )

    def offset(self, buffer: Buffer, index: tuple[Index, ...], env: Env) -> Index:
        """Where an element of an argument lies, over schedule indices."""
        _, layout, _ = self.arguments[id(buffer)]
        return offset_of(layout, buffer.shape, tuple(self.index(i, env) for i in index))

    def index(self, index: Index, env: Env) -> Index:
        """An index over the kernel's variables as one over the schedule's."""
        return index.substitute(dict(env))

    def decide(self, condition: Expr, env: Env) -> bool | None:
        """Whether a condition always holds or never does, as far as the ranges of indices tell."""
        if isinstance(condition, Const):
            return bool(condition.value)
        if not isinstance(condition, Call):
            return None
        if condition.op in ("and", "or"):
            sides = [self.decide(a, env) for a in condition.args]
            absorbing = condition.op == "or"
            if absorbing in sides:
                return absorbing
            return None if None in sides else not absorbing
        if condition.op == "not":
            inner = self.decide(condition.args[0], env)
            return None if inner is None else not inner
        bounds = self.index_sides(condition, env)
        return None if bounds is None else _compare_ranges(condition.op, *bounds)

    def splits(self, e: Expr, env: Env) -> bool:
        """Whether TVM splits a vector loop around `e`: it branches (a guard that is only decided when the kernel runs) or has an operation
        with no vector form. Its values must then be `Let`s, or the loop a serial one."""
        stack, seen = [e], set()
        while stack:
            x = stack.pop()
            if id(x) in seen or not isinstance(x, Call):
                continue
            seen.add(id(x))
            if x.op == "guard":
                known = self.decide(x.args[0], env)
                if known is None:
                    return True
                stack.append(x.args[1] if known else x.args[2])
            elif arithmetic.splits_vectors(x.op, x.dtype):
                return True
            else:
                stack.extend(x.args)
        return False

    # Stores.

    def _target(self, store: Store, env: Env) -> tuple[TirBuffer, Index]:
        array, _, _ = self.arguments[id(store.buffer)]
        return array, self.offset(store.buffer, store.index, env)

    def _put(self, target: tuple[TirBuffer, Index], store: Store, value: TirExpr) -> Stmt:
        array, offset = target
        return self.builder.store(array, offset, narrow(value, store.buffer.dtype))

    # Expressions.

    @contextmanager
    def _printing(self, exprs: Sequence[Expr], env: Env) -> Iterator[tuple[list[Expr], _Scope]]:
        """A fresh top scope for expressions printed with `env`; yields the expressions with equal parts shared."""
        outer = (self._env, self._scope, self._uses, self._masks)
        self._env, self._uses, self._masks = dict(env), {}, []
        scope = self._scope = _Scope(self.builder, None)
        try:
            roots = [self._canon(e) for e in exprs]
            seen: set[int] = set()
            for root in roots:
                self._count_uses(root, seen)
            yield roots, scope
        finally:
            self._env, self._scope, self._uses, self._masks = outer

    def _canon(self, e: Expr) -> Expr:
        """The first expression seen that computes the same."""
        if id(e) in self._canonical:
            return self._canonical[id(e)]
        match e:
            case Const():
                key: tuple[object, ...] = ("const", e.dtype, repr(e.value))
                canonical: Expr = e
            case Load():
                key, canonical = ("load", id(e.buffer), e.index), e
            case FromIndex():
                key, canonical = ("index", e.dtype, e.index), e
            case Call():
                args = tuple(self._canon(a) for a in e.args)
                key = (e.op, e.dtype, *(id(a) for a in args))
                canonical = e if all(a is b for a, b in zip(args, e.args, strict=True)) else Call(e.dtype, e.op, args)
            case _:
                raise TypeError(f"not an expression of the loops language: {e!r}")
        found = self._by_key.setdefault(key, canonical)
        self._canonical[id(e)] = self._canonical[id(found)] = found
        self._kept += [e, found]
        return found

    def _count_uses(self, e: Expr, seen: set[int]) -> None:
        self._uses[id(e)] = self._uses.get(id(e), 0) + 1
        if id(e) in seen or not isinstance(e, Call):
            return
        seen.add(id(e))
        for a in e.args:
            self._count_uses(a, seen)

    def _bind(self, value: TirExpr, dtype: str) -> TirExpr:
        assert self._scope is not None
        return self._scope.bindings.let(value, dtype)

    def _print(self, e: Expr) -> TirExpr:
        assert self._scope is not None
        known = self._scope.find(id(e))
        if known is not None:
            return known
        value = self._print_new(e)
        if self._uses.get(id(e), 2) > 1:
            value = self._scope.known[id(e)] = self._bind(value, e.dtype)
        return value

    def _print_new(self, e: Expr) -> TirExpr:
        match e:
            case Const():
                return arithmetic.literal(e.value, e.dtype)
            case Load():
                return self._load(e)
            case FromIndex():
                index = self.builder.index(self.index(e.index, self._env))
                return index if e.dtype == "int32" else tirx.Cast(e.dtype, index)
            case Call("bool", op, _) if op in COMPARE:
                if (sides := self.index_sides(e, self._env)) is not None:
                    decided = _compare_ranges(op, *sides)
                    if decided is not None:
                        return tirx.IntImm("bool", decided)
                    # In int32, in which the indices are: half as wide as the int64 they stand for.
                    left, right = (self.builder.index(side) for side in sides)
                    return arithmetic.emit(op, "bool", (left, right), "int32", self._bind)
            case Call(_, "guard", _):
                return self._guard(e)
            case Call(_, "round", (x, Const() as target)):
                dtype = ROUND_TARGETS[int(target.value)]
                return widen(narrow(self._print(x), dtype), dtype)
        assert isinstance(e, Call)
        args = tuple(self._bind(self._print(a), a.dtype) for a in e.args)
        return arithmetic.emit(e.op, e.dtype, args, e.args[0].dtype, self._bind)

    def _load(self, e: Load) -> TirExpr:
        if id(e.buffer) in self.locals:
            return self.locals[id(e.buffer)](tuple(self.index(i, self._env) for i in e.index))
        array, _, buffer = self.arguments[id(e.buffer)]
        offset = self.builder.index(self.offset(e.buffer, e.index, self._env))
        for mask in self._masks:
            offset = tirx.Select(mask, offset, tirx.IntImm("int32", 0))
        return widen(tirx.BufferLoad(array, [offset]), buffer.dtype)

    def _guard(self, e: Call) -> TirExpr:
        condition, inside, outside = e.args
        decided = self.decide(condition, self._env)
        if decided is not None:
            return self._print(inside if decided else outside)
        # A condition on indices is cheap: it is printed where it is used, and TVM need not bind a bool.
        test = self.index_test(condition, self._env)
        if test is None:
            test = self._bind(self._print(condition), "bool")
        if self._masks or any(v in self.lanes for v in self._vars_of(condition)):
            self._masks.append(test)
            first = self._branch(inside)
            self._masks.pop()
            return tirx.Select(test, first, self._print(outside))
        return tirx.if_then_else(test, self._branch(inside), self._branch(outside))

    def _branch(self, e: Expr) -> TirExpr:
        """An expression whose bindings stay with it."""
        scope = self._scope = _Scope(self.builder, self._scope)
        try:
            result = self._print(e)
        finally:
            self._scope = scope.outer
        return scope.bindings.around(result)

    def _print_scalar(self, atom: Scalar) -> TirExpr:
        """A scalar inside an index, as int32: read where the index is used, with the environment of the expression around it."""
        value = self.expr(atom.expr, self._env) if self._scope is None else self._print(self._canon(atom.expr))
        return value if atom.expr.dtype == "int32" else tirx.Cast("int32", value)

    def _vars_of(self, e: Expr) -> set[LoopVar]:
        """The schedule's loop variables an expression depends on."""
        found: set[LoopVar] = set()
        stack: list[Any] = [e]
        while stack:
            match stack.pop():
                case Call(_, _, args):
                    stack.extend(args)
                case Load(_, _, index):
                    stack.extend(self.index(i, self._env) for i in index)
                case FromIndex(_, index):
                    stack.append(self.index(index, self._env))
                case Index() as index:
                    stack.extend(atom for atom, _ in index.terms)
                case LoopVar() as variable:
                    found.add(variable)
                case FloorDiv(numerator, _) | Mod(numerator, _):
                    stack.append(numerator)
                case Scalar(inner, _, _):
                    stack.append(inner)
        return found

    def index_test(self, condition: Expr, env: Env) -> TirExpr | None:
        """A condition on indices as one TIR expression without bindings; None for other conditions."""
        if not isinstance(condition, Call):
            return None
        if condition.op in ("and", "or"):
            sides = [self.index_test(a, env) for a in condition.args]
            if None in sides:
                return None
            return (tirx.And if condition.op == "and" else tirx.Or)(*sides)
        bounds = self.index_sides(condition, env)
        if bounds is None:
            return None
        left, right = (self.builder.index(side) for side in bounds)
        return _COMPARISONS[condition.op](left, right)

    def index_sides(self, comparison: Call, env: Env) -> tuple[Index, Index] | None:
        """Both sides of a comparison as indices, where they are."""
        if comparison.op not in COMPARE:
            return None
        sides: list[Index] = []
        for side in comparison.args:
            match side:
                case FromIndex("int64", index):
                    sides.append(self.index(index, env))
                case Const("int64", value) if abs(value) < 2**31:
                    sides.append(as_index(int(value)))
                case _:
                    return None
        return sides[0], sides[1]


def _compare_ranges(op: str, a: Index, b: Index) -> bool | None:
    """What a comparison of two indices gives for all their values, if always the same."""
    if op in ("gt", "ge"):
        return _compare_ranges("lt" if op == "gt" else "le", b, a)
    difference = a - b
    low, high = difference.low, difference.high
    match op:
        case "lt":
            return True if high < 0 else False if low >= 0 else None
        case "le":
            return True if high <= 0 else False if low > 0 else None
        case "eq":
            return True if low == high == 0 else False if low > 0 or high < 0 else None
    equal = _compare_ranges("eq", a, b)
    return None if equal is None else not equal
