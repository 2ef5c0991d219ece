"""Printer: expressions of the loops language as TIR.

An expression is a graph with shared parts; TVM sees trees. So every value used twice is bound to a variable: as `Bind` statements before a
store, or as a chain of `Let`s in an expression. Equal subexpressions (same operation, same operands) are found first, shared or not.

    printer = Printer(builder, {x: (x_array, layout)})
    body = builder.loop(16, lambda i: printer.store(store, {store_var: i}), "vectorized")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tvm import tirx

from torch_hybrid_backend.engines.cpu.tir import arithmetic, math
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr, converted
from torch_hybrid_backend.engines.cpu.tir.expressions import const
from torch_hybrid_backend.engines.cpu.tir.let_bindings import Bindings, Scope, StatementBindings
from torch_hybrid_backend.engines.cpu.tir.storage import narrow, widen
from torch_hybrid_backend.loops.index import Index, LoopVar, Scalar, as_index, compare_ranges
from torch_hybrid_backend.loops.ir import ROUND_TARGETS, Buffer, Call, Const, Expr, FromIndex, Load
from torch_hybrid_backend.loops.kernels import Store
from torch_hybrid_backend.loops.layout import Layout, offset_of
from torch_hybrid_backend.loops.ops import COMPARE, call, decided
from torch_hybrid_backend.loops.sharing import Sharing

Env = Mapping[LoopVar, Index]
# Branches around vectors for guards: of more, the rest is computed with masks. A concatenation of 32 tensors needs as many.
_MAX_CASES = 64
# The value of a kernel-local buffer at a logical index (over schedule indices).
LocalLoad = Callable[[tuple[Index, ...]], TirExpr]


class Printer:
    """Prints the expressions of one kernel.

    `arguments` maps each buffer in memory to its array and its layout. `locals` overrides loads of kernel-local
    buffers (accumulators, row scalars). `lanes` names the schedule's vector loop variables: a guard that depends on one is computed for all
    lanes, with its loads moved inside their buffers, because a branch would make TVM split the vector.
    """

    def __init__(self, builder: Builder, arguments: Mapping[Buffer, tuple[TirBuffer, Layout]]) -> None:
        self.builder = builder
        self.arguments = arguments
        self.locals: dict[Buffer, LocalLoad] = {}
        self.lanes: set[LoopVar] = set()
        self._env: dict[LoopVar, Index] = {}
        self._scope: Scope | None = None
        self._sharing = Sharing()
        self._uses: dict[Expr, int] = {}
        self._masks: list[TirExpr] = []
        self._uniform: dict[Expr, bool] = {}
        self._hoisted: dict[Expr, TirExpr] = {}  # canonical expression -> its value before the vector loop
        self._is_hoisting = self._is_in_branch = False
        self._lane: tuple[Index, int] = (as_index(0), 1)
        self._allocations: list[Stmt] | None = None  # of the vector loop being emitted
        builder.print_scalar = self._print_scalar

    # Public: expressions and stores.

    def vector_loop(self, width: int, body: Callable[[Index], Stmt]) -> Stmt:
        """A vectorised loop of `width` lanes; what its statements bind is declared in front of it."""
        outer = (self._lane, self._allocations)
        allocations = self._allocations = []

        def with_lane(lane: Index) -> Stmt:
            self.lanes.update(atom for atom, _ in lane.terms if isinstance(atom, LoopVar))
            self._lane = (lane, width)
            return body(lane)

        try:
            loop = self.builder.loop(width, with_lane, "vectorized", "l")
        finally:
            self._lane, self._allocations = outer
        return self.builder.seq(*allocations, loop)

    def expr(self, e: Expr, env: Env) -> TirExpr:
        """A TIR expression, self-contained (values used twice are `Let`s); `env` gives the kernel's loop variables."""
        with self._printing([e], env, Bindings(self.builder)) as (roots, scope):
            result = self._print(roots[0])
            return scope.bindings.around(result)

    def narrow(self, value: TirExpr, dtype: str) -> TirExpr:
        """`storage.narrow` by what the target has."""
        return narrow(value, dtype, computes_float16=self.builder.computes_float16)

    def widen(self, value: TirExpr, dtype: str) -> TirExpr:
        """`storage.widen` by what the target has."""
        return widen(value, dtype, computes_float16=self.builder.computes_float16)

    def evaluate(self, exprs: Sequence[Expr], env: Env, use: Callable[[list[TirExpr]], Stmt]) -> Stmt:
        """Bind what the expressions share, then `use` their values (each may be used many times) in a statement."""
        own: list[Stmt] = []
        allocations = own if self._allocations is None else self._allocations
        bindings = StatementBindings(self.builder, *self._lane, allocations)
        with self._printing(exprs, env, bindings) as (roots, _):
            values = [self._bind(self._print(root), root.dtype) for root in roots]
            return self.builder.seq(*own, bindings.before(use(values)))

    def cases(self, exprs: Sequence[Expr], env: Env, build: Callable[[list[Expr]], Stmt]) -> Stmt:
        """`build` of the expressions, with a branch for every guard that depends on no lane: inside each branch the guard is decided.

        A branch around whole vectors costs a jump; one inside an expression would make TVM compute lane by lane.
        """
        return self._split([self._sharing.of(e) for e in exprs], dict(env), build, _MAX_CASES)

    def _split(self, exprs: list[Expr], env: Env, build: Callable[[list[Expr]], Stmt], budget: int) -> Stmt:
        found = self._uniform_guard(exprs, env) if budget > 1 else None
        if found is None:
            return build(exprs)
        guard, test = found
        outer, self._is_in_branch = self._is_in_branch, True
        inside, outside = (
            self._split([self._sharing.of(decided(e, guard, branch)) for e in exprs], env, build, budget // 2)
            for branch in (1, 2)
        )
        self._is_in_branch = outer
        return self.builder.when(test, inside, outside)

    def _uniform_guard(self, exprs: Sequence[Expr], env: Env) -> tuple[Call, TirExpr] | None:
        """The first guard that only the running kernel decides, the same for all lanes, with its test."""
        stack, seen = list(exprs), set()
        while stack:
            e = stack.pop()
            if e in seen or not isinstance(e, Call):
                continue
            seen.add(e)
            if e.op != "guard":
                stack.extend(e.args)
                continue
            known = self.decide(e.args[0], env)
            if known is not None:
                stack.append(e.args[1] if known else e.args[2])
                continue
            if not self._depends_on_lane(e.args[0], env):
                test = self.index_test(e.args[0], env)
                if test is not None:
                    return e, test
            stack.extend(e.args[1:])
        return None

    def _depends_on_lane(self, condition: Expr, env: Env) -> bool:
        if isinstance(condition, Call) and condition.op in ("and", "or"):
            return any(self._depends_on_lane(a, env) for a in condition.args if self.decide(a, env) is None)
        if isinstance(condition, Call) and condition.op == "not":
            return self._depends_on_lane(condition.args[0], env)
        sides = self.index_sides(condition, env) if isinstance(condition, Call) else None
        if sides is None:
            return True
        # What an index reads from a tensor is read where the expression is printed: not before it, and perhaps for each lane.
        return any(isinstance(a, Scalar) or a in self.lanes for side in sides for a in side.leaves())

    def store(self, store: Store, env: Env) -> Stmt:
        """buffer[index] = value."""
        return self.stores([store], env)

    def stores(self, stores: Sequence[Store], env: Env) -> Stmt:
        """Several stores at one point; what their values share is computed once."""
        targets = [self._target(store, env) for store in stores]

        def put(values: list[TirExpr]) -> Stmt:
            return self.builder.seq(*(self._put(t, s, v) for t, s, v in zip(targets, stores, values, strict=True)))

        return self.cases([s.value for s in stores], env, lambda exprs: self.evaluate(exprs, env, put))

    def offset(self, buffer: Buffer, index: tuple[Index, ...], env: Env) -> Index:
        """The place of an element of an argument, over schedule indices."""
        _, layout = self.arguments[buffer]
        return offset_of(layout, buffer.shape, tuple(self.index(i, env) for i in index))

    def index(self, index: Index, env: Env) -> Index:
        """An index over the kernel's variables as one over the schedule's."""
        return index.substitute(dict(env))

    def decide(self, condition: Expr, env: Env) -> bool | None:
        """True if a condition always holds or never does, as far as the ranges of indices tell."""
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
        return None if bounds is None else compare_ranges(condition.op, *bounds)

    # Stores.

    def _target(self, store: Store, env: Env) -> tuple[TirBuffer, Index]:
        array, _ = self.arguments[store.buffer]
        return array, self.offset(store.buffer, store.index, env)

    def _put(self, target: tuple[TirBuffer, Index], store: Store, value: TirExpr) -> Stmt:
        array, offset = target
        return self.builder.store(array, offset, self.narrow(value, store.buffer.dtype))

    # Expressions.

    @contextmanager
    def _printing(self, exprs: Sequence[Expr], env: Env, bindings: Bindings) -> Iterator[tuple[list[Expr], Scope]]:
        """A fresh top scope for expressions printed with `env`; yields the expressions with equal parts shared."""
        outer = (self._env, self._scope, self._uses, self._masks, self._uniform, self._hoisted)
        self._env, self._uses, self._masks, self._uniform, self._hoisted = dict(env), {}, [], {}, {}
        scope = self._scope = Scope(bindings, None)
        try:
            roots = [self._sharing.of(e) for e in exprs]
            seen: set[Expr] = set()
            for root in roots:
                self._count_uses(root, seen)
            yield roots, scope
        finally:
            self._env, self._scope, self._uses, self._masks, self._uniform, self._hoisted = outer

    def _count_uses(self, e: Expr, seen: set[Expr]) -> None:
        self._uses[e] = self._uses.get(e, 0) + 1
        if e in seen or not isinstance(e, Call):
            return
        seen.add(e)
        for a in e.args:
            self._count_uses(a, seen)

    def _bind(self, value: TirExpr, dtype: str) -> TirExpr:
        assert self._scope is not None
        return self._scope.bindings.let(value, dtype)

    def _print(self, e: Expr) -> TirExpr:
        assert self._scope is not None
        known = self._hoisted.get(e)
        if known is None and not self._is_hoisting:
            known = self._scope.find(e)
        if known is not None:
            return known
        if isinstance(e, Call) and e.dtype != "bool" and self._is_uniform(e):
            # A place between pixels or a row's number, say: once before the vector loop, and what is read there is a vector, not a gather.
            hoisted = self._scope.bindings.hoisted(lambda: self._print_before(e), e.dtype)
            if hoisted is not None:
                self._hoisted[e] = hoisted
                return hoisted
        value = self._print_new(e)
        if self._uses.get(e, 2) > 1:
            value = self._bind(value, e.dtype)
            (self._hoisted if self._is_hoisting else self._scope.known)[e] = value
        return value

    def _print_before(self, e: Expr) -> TirExpr:
        """A uniform scalar as the code before the vector loop computes it: from nothing that is kept for each lane."""
        self._is_hoisting = True
        value = self._print_new(e)
        self._is_hoisting = False
        return value

    def _is_uniform(self, e: Expr) -> bool:
        """True if a scalar is computed from indices other than the lane alone, and from integers read at such indices."""
        known = self._uniform.get(e)
        if known is None:
            match e:
                case Call():
                    known = e.op != "guard" and all(map(self._is_uniform, e.args))
                case FromIndex():
                    known = self._is_uniform_index(e.index)
                case Load():
                    # Inside a guard a place may be outside the tensor: nothing is read there before the guard.
                    known = (
                        e.dtype in ("int32", "int64")
                        and e.buffer in self.arguments
                        and e.buffer not in self.locals
                        and not (self._masks or self._is_in_branch)
                        and all(map(self._is_uniform_index, e.index))
                    )
                case _:
                    known = isinstance(e, Const)
            self._uniform[e] = known
        return known

    def _is_uniform_index(self, index: Index) -> bool:
        leaves = self.index(index, self._env).leaves()
        return all(
            self._is_uniform(self._sharing.of(a.expr)) if isinstance(a, Scalar) else a not in self.lanes for a in leaves
        )

    def _print_new(self, e: Expr) -> TirExpr:
        match e:
            case Const():
                return const(e.value, e.dtype)
            case Load():
                return self._load(e)
            case FromIndex():
                index = self.index(e.index, self._env)
                dtype = self.builder.index_dtype(index)
                return converted(self.builder.index(index, dtype), dtype, e.dtype)
            case Call("bool", op, _) if op in COMPARE:
                if (sides := self.index_sides(e, self._env)) is not None:
                    known = compare_ranges(op, *sides)
                    if known is not None:
                        return tirx.IntImm("bool", known)
                    # Mostly in int32: half as wide as the int64 they stand for.
                    dtype = self.builder.index_dtype(*sides)
                    left, right = (self.builder.index(side, dtype) for side in sides)
                    return arithmetic.emit(op, "bool", (left, right), dtype, self._bind)
            case Call(_, "guard", _):
                return self._guard(e)
            case Call(_, "round", (x, Const() as target)):
                dtype = ROUND_TARGETS[int(target.value)]
                value = self._print(x)
                if isinstance(x, Call) and (dtype == "bfloat16" or self.builder.computes_float16):
                    value = self._bind(value, x.dtype)  # rounding prints it several times
                return self.widen(self.narrow(value, dtype), dtype)
            case Call("int8" | "uint8" | "int32", "cast", (x,)) if (unrounded := _unrounded(x)) is not None:
                # One instruction rounds and converts.
                number = self._bind(self._print(unrounded), "float32")
                return arithmetic.cast(math.round_even_to_int32(number), "int32", e.dtype)
        assert isinstance(e, Call)
        # What is printed once needs no variable: each is five more statements for TVM and LLVM to see through.
        once = arithmetic.prints_operands_once(e.op, e.dtype)
        args = tuple(self._print(a) if once else self._bind(self._print(a), a.dtype) for a in e.args)
        return arithmetic.emit(e.op, e.dtype, args, e.args[0].dtype, self._bind)

    def _load(self, e: Load) -> TirExpr:
        if e.buffer in self.locals:
            return self.locals[e.buffer](tuple(self.index(i, self._env) for i in e.index))
        array, _ = self.arguments[e.buffer]
        offset = self.builder.index(self.offset(e.buffer, e.index, self._env))
        for mask in self._masks:
            offset = tirx.Select(mask, offset, self.builder.size(0))
        return self.widen(tirx.BufferLoad(array, [offset]), e.buffer.dtype)

    def _guard(self, e: Call) -> TirExpr:
        condition, inside, outside = e.args
        known = self.decide(condition, self._env)
        if known is not None:
            return self._print(inside if known else outside)
        # A condition on indices is cheap: it is printed where it is used, and TVM need not bind a bool.
        test = self.index_test(condition, self._env)
        if test is None:
            test = self._bind(self._print(condition), "bool")
        # Both sides are computed; what the guarded side loads is moved inside its buffer where the condition fails.
        self._masks.append(test)
        scope, uniform = self._scope, self._uniform
        assert scope is not None
        self._scope, self._uniform = Scope(scope.bindings, scope), {}
        try:
            first = self._print(inside)
        finally:
            self._scope, self._uniform = scope, uniform
            self._masks.pop()
        return tirx.Select(test, first, self._print(outside))

    def _print_scalar(self, atom: Scalar) -> TirExpr:
        """A scalar inside an index, of the dtype of addresses: read where the index is used, in the environment around it."""
        value = self.expr(atom.expr, self._env) if self._scope is None else self._print(self._sharing.of(atom.expr))
        return converted(value, atom.expr.dtype, self.builder.address)

    def index_test(self, condition: Expr, env: Env) -> TirExpr | None:
        """A condition on indices as one TIR expression without bindings; None for other conditions."""
        if not isinstance(condition, Call):
            return None
        if condition.op in ("and", "or"):
            # The side that is decided, to what leaves it to the other, drops out.
            undecided = [a for a in condition.args if self.decide(a, env) is None]
            sides = [self.index_test(a, env) for a in undecided or condition.args]
            if None in sides or len(sides) == 1:
                return None if None in sides else sides[0]
            return (tirx.And if condition.op == "and" else tirx.Or)(*sides)
        if condition.op == "not":
            inner = self.index_test(condition.args[0], env)
            return None if inner is None else tirx.Not(inner)
        bounds = self.index_sides(condition, env)
        if bounds is None:
            return None
        dtype = self.builder.index_dtype(*bounds)
        left, right = (self.builder.index(side, dtype) for side in bounds)
        return arithmetic.COMPARISONS[condition.op](left, right)

    def index_sides(self, comparison: Call, env: Env) -> tuple[Index, Index] | None:
        """Both sides of a comparison as indices, where they are."""
        if comparison.op not in COMPARE:
            return None
        sides: list[Index] = []
        for side in comparison.args:
            match side:
                case FromIndex("int64", index):
                    sides.append(self.index(index, env))
                case Const("int64", value):
                    sides.append(as_index(int(value)))
                case _:
                    return None
        left, right = sides
        # Behind another tensor of a concatenation: `x - 96 >= 0` is `x >= 96`.
        if isinstance(left.const, int) and left.const < 0:
            left, right = left - left.const, right - left.const
        if comparison.op in ("lt", "ge") and right.is_const and isinstance(right.const, int) and right.const > 0:
            # `block * 16 + lane < 64` is `block < 4`: the lane drops out.
            left, right = left.coarse_bound(right.const)
        return left, right


def _unrounded(e: Expr) -> Expr | None:
    """`e`, rounded in float32 and then limited to integers, without the rounding, which a conversion repeats; None for any other expression."""
    match e:
        case Call("float32", "round_even", (x,)):
            return x
        case Call("float32", "max" | "min" as op, (x, Const() as limit)) if float(limit.value).is_integer():
            inner = _unrounded(x)
            return None if inner is None else call(op, inner, limit)
    return None
