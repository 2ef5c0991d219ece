"""Builder: TIR statements emitted directly as loops.

Schedules call `loop` with a function of the loop's index; indices are `loops.Index`, so address arithmetic is simplified before TVM
sees it. Loops of one iteration vanish.

    b = Builder()
    body = b.loop(8, lambda i: b.loop(16, lambda l: b.store(out, i * 16 + l, value), "vectorized"), "parallel")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tvm
from tvm import tirx

from torch_hybrid_backend.engines.cpu.target import LINE_BYTES
from torch_hybrid_backend.errors import ScheduleError
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Mod, Scalar, as_index, is_wide
from torch_hybrid_backend.sizes.size import MAX_SIZE, Dim, Function, Symbol, known_at_most, product

_KINDS = {
    "serial": tirx.ForKind.SERIAL,
    "parallel": tirx.ForKind.PARALLEL,
    "vectorized": tirx.ForKind.VECTORIZED,
    "unrolled": tirx.ForKind.UNROLLED,
}

# The largest local buffer that lives on the stack. A kernel holds a few at once, and a thread's stack is 2 MB or more.
_STACK_BYTES = 64 << 10
# The smallest that is aligned.
_ALIGNED_BYTES = 1 << 10
# Without this annotation TVM 0.27 takes every local buffer, however small, from the heap: two calls each, and never a register.
_ON_STACK = {"disable_lower_builtin": tirx.IntImm("bool", 1)}

_ANY_LENGTH = MAX_SIZE

# An integer that LLVM knows nothing of. No instruction.
_UNSEEN = """
define linkonce_odr i32 @hybrid_unseen(i32 %x) alwaysinline {
  %r = call i32 asm "", "=r,0"(i32 %x)
  ret i32 %r
}
"""

Choice = TypeVar("Choice")
Stmt = Any  # tirx.Stmt; TVM's classes carry no types
TirExpr = Any  # tirx.Expr
TirBuffer = Any  # a tirx buffer variable


class Builder:
    """Makes statements of one kernel. Owns its loop variables: an index made by another builder cannot be printed.

    schedule_rank: the kernel's; `ways` is how many ranks there were for it, 1 where the schedule has not asked. address: the dtype of loop
    variables and of places in memory, "int32" or "int64". emulates: dot products of AArch64 are written as arithmetic, for any machine.
    """

    def __init__(
        self, schedule_rank: int = 0, address: str = "int32", *, emulates: bool = False, computes_float16: bool = False
    ) -> None:
        self.schedule_rank = schedule_rank
        self.emulates = emulates
        self.computes_float16 = computes_float16
        self.address = address
        self.ways = 1
        self._vars: dict[LoopVar, TirExpr] = {}
        self._sizes: dict[Symbol, TirExpr] = {}
        self._quotients: dict[tuple[FloorDiv | Mod, str], TirExpr] = {}
        self._count = 0
        # Set by the printer: how a scalar of the loops language inside an index is printed.
        self.print_scalar: Callable[[Scalar], TirExpr] | None = None
        # LLVM's text of functions that the kernel calls; each once.
        self.llvm_helpers: dict[str, None] = {}

    def fresh(self, stem: str) -> str:
        """A name no other object of this kernel has."""
        self._count += 1
        return f"{stem}{self._count}"

    def ranked_choice(self, estimates: Mapping[Choice, float]) -> Choice:
        """The way of the kernel's `schedule_rank`: of the shortest estimated time, the second shortest...; of equal ones the first comes first.

        Raises ScheduleError where there are not so many. A schedule asks once.
        """
        self.ways = len(estimates)
        if self.schedule_rank >= self.ways:
            raise ScheduleError(f"rank {self.schedule_rank} was asked of a schedule that has {self.ways} ways")
        return sorted(estimates, key=estimates.__getitem__)[self.schedule_rank]

    def argument_size(self, symbol: Symbol) -> TirExpr:
        """A kernel argument that holds a size known only at run time, or an integer."""
        return self._sizes.setdefault(symbol, tirx.Var(self.fresh("n"), size_dtype(symbol)))

    def size(self, size: Dim, dtype: str = "") -> TirExpr:
        """A size as a TIR expression, by default of the dtype of addresses."""
        dtype = dtype or self.address
        if isinstance(size, int):
            return tirx.IntImm(dtype, size)
        total: TirExpr = None
        for monomial, coefficient in size.terms.items():
            part: TirExpr = None
            for atom, power in monomial:
                for _ in range(power):
                    factor = self._size_atom(atom, dtype)
                    part = factor if part is None else part * factor
            number = tirx.IntImm(dtype, coefficient)
            part = number if part is None else part if coefficient == 1 else part * number
            total = part if total is None else total + part
        return total

    def _size_atom(self, atom: Symbol | Function, dtype: str) -> TirExpr:
        if isinstance(atom, Symbol):
            return converted(self._sizes[atom], size_dtype(atom), dtype)
        operation = {"floordiv": tirx.floordiv, "mod": tirx.floormod, "max": tirx.Max, "min": tirx.Min}[atom.name]
        width = self.index_dtype(atom.left, atom.right)
        return converted(operation(self.size(atom.left, width), self.size(atom.right, width)), width, dtype)

    def loop(self, extent: Dim, body: Callable[[Index], Stmt], kind: str = "serial", name: str = "i") -> Stmt:
        """`for i in range(extent): body(i)`; kind is serial, parallel, vectorized or unrolled."""
        if extent == 1:
            return body(as_index(0))
        variable = LoopVar(self.fresh(name), extent)
        tir_var = tirx.Var(variable.name, self.address)
        self._vars[variable] = tir_var
        return tirx.For(tir_var, self.size(0), self.size(extent), _KINDS[kind], body(Index(((variable, 1),), 0)))

    def loop_until(self, limit: TirExpr, extent: Dim, body: Callable[[Index], Stmt], name: str = "i") -> Stmt:
        """`for i in range(limit): body(i)`, where `limit` is at most `extent`."""
        variable = LoopVar(self.fresh(name), extent)
        self._vars[variable] = tirx.Var(variable.name, self.address)
        return tirx.For(self._vars[variable], self.size(0), limit, _KINDS["serial"], body(Index(((variable, 1),), 0)))

    def rolled(self, extent: int, body: Callable[[Index], Stmt], name: str = "i") -> Stmt:
        """`for i in range(extent): body(i)`, which LLVM leaves a loop: it does not see the extent."""
        if extent == 1:
            return body(as_index(0))
        self.llvm_helpers[_UNSEEN] = None
        unseen = tirx.call_pure_extern("int32", "hybrid_unseen", tirx.IntImm("int32", extent))
        return self.loop_until(unseen, extent, body, name)

    def bound(self, value: TirExpr, extent: Dim, name: str) -> tuple[Index, Stmt]:
        """An index that holds a value of the dtype of addresses in 0 .. extent-1, and the statement that must come before its uses."""
        variable = LoopVar(self.fresh(name), extent)
        self._vars[variable] = tirx.Var(variable.name, self.address)
        return Index(((variable, 1),), 0), tirx.stmt.Bind(self._vars[variable], value)

    def nest(
        self, extents: Sequence[Dim], body: Callable[[tuple[Index, ...]], Stmt], kind: str = "serial", name: str = "i"
    ) -> Stmt:
        """Nested loops, outermost first."""

        def at(done: tuple[Index, ...]) -> Stmt:
            if len(done) == len(extents):
                return body(done)
            return self.loop(extents[len(done)], lambda i: at((*done, i)), kind, name)

        return at(())

    def fused(
        self, extents: Sequence[Dim], body: Callable[[tuple[Index, ...]], Stmt], kind: str = "parallel", name: str = "p"
    ) -> Stmt:
        """A single loop over the row-major product of `extents`; `body` gets the coordinates."""
        total = product(extents)

        def at(flat: Index) -> Stmt:
            coordinates: list[Index] = []
            step = total
            for extent in extents:
                step = step // extent
                coordinates.append(flat // step % extent if extent != 1 else as_index(0))
            return body(tuple(coordinates))

        return self.loop(total, at, kind, name)

    def seq(self, *statements: Stmt | None) -> Stmt:
        """Statements one after the other; None is skipped."""
        present = [s for s in statements if s is not None]
        return present[0] if len(present) == 1 else tirx.SeqStmt(present)

    def local(self, size: Dim, dtype: str, name: str = "local") -> TirBuffer:
        """A buffer private to the innermost enclosing loop body (declare it there with `alloc`)."""
        scope = "local" if isinstance(size, int) else "global"  # a stack frame's size is fixed when it is compiled
        return tirx.decl_buffer((self.size(size),), dtype, self.fresh(name), scope=scope)

    def workspace(self, size: Dim, dtype: str, name: str) -> TirBuffer:
        """A buffer on the heap, private to the innermost enclosing loop body (declare it there with `alloc_on_heap`)."""
        return tirx.decl_buffer((self.size(size),), dtype, self.fresh(name), scope="global")

    def alloc_on_heap(self, buffer: TirBuffer) -> Stmt:
        """Declares a buffer made by `workspace`."""
        return tirx.stmt.AllocBuffer(buffer)

    def alloc(self, buffer: TirBuffer) -> Stmt:
        """Declares a buffer made by `local`: on the stack, and so in registers where LLVM can, unless it is large.

        Where it has 16 lines of the caches it begins with one: what is read and written in vectors, or tiles, would often be in two lines.
        """
        if not isinstance(buffer.shape[0], tirx.IntImm):
            return tirx.stmt.AllocBuffer(buffer)
        size = int(buffer.shape[0]) * int(tvm.DataType(str(buffer.dtype)).bits) // 8
        if size > _STACK_BYTES:
            return tirx.stmt.AllocBuffer(buffer)
        if size < _ALIGNED_BYTES:
            return tirx.stmt.AllocBuffer(buffer, _ON_STACK)
        # TVM aligns an array of the stack to 16 bytes at most, but LLVM one of vectors to theirs.
        lines = tirx.decl_buffer(
            (-(-size // LINE_BYTES),), f"float32x{LINE_BYTES // 4}", self.fresh("lines"), scope="local"
        )
        declared = tirx.stmt.DeclBuffer(buffer, data=lines.data)
        return self.seq(tirx.stmt.AllocBuffer(lines, _ON_STACK), declared)

    def index(self, index: Index | Dim, dtype: str = "") -> TirExpr:
        """An index as a TIR expression, by default of the dtype of addresses."""
        dtype = dtype or self.address
        index = as_index(index)
        total: TirExpr = None
        for atom, coefficient in index.terms:
            part = self._atom(atom, dtype)
            if coefficient != 1:
                part = tirx.Mul(part, self.size(coefficient, dtype))
            total = part if total is None else tirx.Add(total, part)
        if total is None:
            return self.size(index.const, dtype)
        # Numbers come last, behind sizes known only at run time: neighbouring places are then one address and a displacement.
        number = index.const if isinstance(index.const, int) else index.const.terms.get((), 0)
        for part in (index.const - number, number):
            total = tirx.Add(total, self.size(part, dtype)) if part != 0 else total
        return total

    def _atom(self, atom: object, dtype: str) -> TirExpr:
        if not isinstance(atom, FloorDiv | Mod):
            return self._new_atom(atom, dtype)
        # The same quotients are in most of a kernel's addresses. A scalar is printed anew: where, and as what, changes.
        found = self._quotients.get((atom, dtype))
        if found is None:
            found = self._new_atom(atom, dtype)
            if not any(isinstance(leaf, Scalar) for leaf in atom.numerator.leaves()):
                self._quotients[atom, dtype] = found
        return found

    def _new_atom(self, atom: object, dtype: str) -> TirExpr:
        match atom:
            case LoopVar():
                return converted(self._vars[atom], self.address, dtype)
            case FloorDiv(numerator, divisor):
                # Truncating division is cheaper and equal where nothing is negative.
                divide = tvm.tirx.truncdiv if _is_positive(numerator) else tvm.tirx.floordiv
                width = self.index_dtype(numerator, divisor)
                return converted(divide(self.index(numerator, width), self.size(divisor, width)), width, dtype)
            case Mod(numerator, divisor):
                remainder = tvm.tirx.truncmod if _is_positive(numerator) else tvm.tirx.floormod
                width = self.index_dtype(numerator, divisor)
                return converted(remainder(self.index(numerator, width), self.size(divisor, width)), width, dtype)
            case Scalar():
                if self.print_scalar is None:
                    raise TypeError("this kernel has no printer for scalars used as indices")
                return converted(self.print_scalar(atom), self.address, dtype)
        raise TypeError(f"not an index atom: {atom!r}")

    def equal(self, index: Index, other: Index | int) -> TirExpr:
        """True, a bool, where two indices are equal: folded where both are known."""
        return self.index(index).equal(self.index(other))

    def index_dtype(self, *operands: Index | Dim) -> str:
        """The dtype in which indices are compared, divided, and their extremes taken: int64 where the operands may need it.

        The low bits of operands tell those of sums and products, in which places in memory are computed, and of nothing else.
        """
        return "int64" if any(is_wide(as_index(operand)) for operand in operands) else self.address

    def variable(self, stem: str, dtype: str) -> TirExpr:
        """A new variable of `dtype`, a scalar's or a vector's; `bind` gives it its value."""
        return tirx.Var(self.fresh(stem), dtype)

    def bind(self, variable: TirExpr, value: TirExpr) -> Stmt:
        """Computes `value`, of the variable's dtype, for the statements behind this one."""
        return tirx.stmt.Bind(variable, value)

    def pointer(self, buffer: TirBuffer, offset: Index | int) -> TirExpr:
        """The address of an element, for instructions that take one."""
        return tirx.address_of(self.load(buffer, offset))

    def load(self, buffer: TirBuffer, offset: Index | int) -> TirExpr:
        return tirx.BufferLoad(buffer, [self.index(offset)])

    def store(self, buffer: TirBuffer, offset: Index | int, value: TirExpr) -> Stmt:
        return tirx.BufferStore(buffer, value, [self.index(offset)])

    def load_vector(self, buffer: TirBuffer, offset: Index | int, lanes: int) -> TirExpr:
        """`lanes` neighbouring elements as one vector, outside of a vectorised loop."""
        return tirx.BufferLoad(buffer, [self._lanes(offset, lanes)])

    def store_vector(self, buffer: TirBuffer, offset: Index | int, value: TirExpr, lanes: int) -> Stmt:
        """A vector of `lanes` to neighbouring elements."""
        return tirx.BufferStore(buffer, value, [self._lanes(offset, lanes)])

    def _lanes(self, offset: Index | int, lanes: int) -> TirExpr:
        return tirx.Ramp(self.index(offset), self.size(1), lanes)

    def prefetch(self, buffer: TirBuffer, offset: TirExpr, level: int = 2, *, to_write: bool = False) -> Stmt:
        """Asks for the cache line of element `offset`, an int32 that may lie outside the buffer, into the cache of that level.

        to_write: stores to the line follow.
        """
        address = tirx.address_of(tirx.BufferLoad(buffer, [offset]))
        write, locality, data = (tirx.const(flag, "int32") for flag in (int(to_write), 4 - level, 1))
        return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, write, locality, data))

    def when(self, condition: TirExpr, then: Stmt, otherwise: Stmt | None = None) -> Stmt:
        return tirx.IfThenElse(condition, then, otherwise)


def size_dtype(symbol: Symbol) -> str:
    """The dtype of a kernel's argument that holds a size known only at run time, or an integer."""
    return "int64" if symbol.is_wide else "int32"


def converted(number: TirExpr, source: str, target: str) -> TirExpr:
    """An integer in another width. Casting one to its own would hide from TVM what it knows of it."""
    return number if source == target else tirx.Cast(target, number)


def _is_positive(index: Index) -> bool:
    return known_at_most(0, index.low)


def argument(span: Dim, dtype: str, name: str) -> TirBuffer:
    """A kernel argument: a 1-D array of `span` elements, aligned to its element only (views may start anywhere)."""
    itemsize = max(1, tvm.DataType(dtype).bits // 8)
    # How long an array of a size known at run time is, no access asks.
    length = tirx.IntImm("int32" if span <= _ANY_LENGTH else "int64", span) if isinstance(span, int) else _ANY_LENGTH
    return tirx.decl_buffer((length,), dtype, name, data_alignment=itemsize)


def prim_func(name: str, arguments: Sequence[TirBuffer], body: Stmt, llvm_helpers: Iterable[str] = ()) -> Any:
    """A kernel as a TIR function; its arguments never alias. `llvm_helpers`: the builder's, which LLVM links into the kernel."""
    for text in llvm_helpers:
        body = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", tvm.ir.StringImm(text), body)
    function = tirx.PrimFunc(list(arguments), body)
    return function.with_attr({"global_symbol": name, "tirx.noalias": True, "s_tir": True})
