"""Kernel keys: the keys under which compiled kernels are cached.

`canonical_text` has every field of a kernel, also fields added later: it walks the dataclasses. It is the same however the kernel was
constructed: buffers are named by their argument position, loop variables by the order of their first appearance.

    kernel = MapKernel(domain=(v0 in 8,), reads=(Argument(buffer=arg0 float32 (8,), ...
"""

from __future__ import annotations

import dataclasses
import hashlib

from torch_hybrid_backend.codegen.compiler import CodeTarget, KernelCompilerModule, compiler_version
from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Mod, Scalar
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, FromIndex, Load
from torch_hybrid_backend.loops.kernels import Kernel, kernel_sizes
from torch_hybrid_backend.sizes.forms import render
from torch_hybrid_backend.sizes.size import Dim, Size


def kernel_key(kernel: Kernel, target: CodeTarget, compiler: KernelCompilerModule) -> str:
    """SHA-256 (64 hexadecimal digits) of everything that an artifact depends on: the kernel, the target, the compiler's sources and version.

    Raises TypeError if a kernel holds an object without a canonical text, such as a function.
    """
    parts = (canonical_text(kernel), target.fingerprint, compiler_version(compiler))
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()


def canonical_text(kernel: Kernel) -> str:
    """A text that is equal for two kernels exactly if they differ at most in names and object identity."""
    return _Text(kernel).text


class _Text:
    """Writes one kernel. Owns the numbering of its buffers, loop variables and expressions."""

    def __init__(self, kernel: Kernel) -> None:
        self._buffers: dict[Buffer, str] = {}
        for position, argument in enumerate((*kernel.reads, *kernel.writes)):
            self._buffers.setdefault(argument.buffer, f"arg{position}")
        self._vars: dict[LoopVar, str] = {}
        self._lines: list[str] = []
        # Sizes by their position among the arguments, with the value that schedules take for typical and the range that they rely on.
        self._sizes = {s: f"n{i}" for i, s in enumerate(kernel_sizes(kernel))}
        self._lines += [f"{name} like {size.hint} in {size.low}..{size.high}" for size, name in self._sizes.items()]
        # Expressions are numbered by their text, so that a shared one and an equal copy of it look the same. `_known` spares
        # walking a shared one again.
        self._numbers: dict[str, str] = {}
        self._known: dict[Expr, str] = {}
        # First the loop variables a kernel declares, in the order of its fields: terms of sums are sorted by their text, which
        # must not depend on the order in which the expressions happen to be met.
        for field in dataclasses.fields(kernel):
            value = getattr(kernel, field.name)
            for variable in value if isinstance(value, tuple) else (value,):
                if isinstance(variable, LoopVar):
                    self._var(variable)
        shown = self._value(kernel)
        self.text = "\n".join([*self._lines, shown])

    def _value(self, value: object) -> str:
        match value:
            case Buffer():
                return self._buffer(value)
            case Expr():
                return self._expr(value)
            case Index():
                return self._index(value)
            case LoopVar():
                return self._var(value)
            case Size():
                return self._dim(value)
            case tuple() | list():
                return f"({', '.join(self._value(item) for item in value)})"
            case None | bool() | int() | float() | str():
                return repr(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = sorted(field.name for field in dataclasses.fields(value))
            fields = ", ".join(f"{name}={self._value(getattr(value, name))}" for name in names)
            return f"{type(value).__name__}({fields})"
        raise TypeError(f"a kernel holds {value!r}, a {type(value).__name__}, which has no canonical text")

    def _buffer(self, buffer: Buffer) -> str:
        name = self._buffers.get(buffer)
        if name is None:
            locals_before = sum(known.startswith("local") for known in self._buffers.values())
            name = self._buffers[buffer] = f"local{locals_before}"
        kind = " constant" if buffer.constant else " by value" if buffer.by_value else ""
        return f"{name} {buffer.dtype} {self._value(tuple(buffer.shape))}{kind}"

    def _var(self, variable: LoopVar) -> str:
        name = self._vars.setdefault(variable, f"v{len(self._vars)}")
        return f"{name} in {self._dim(variable.extent)}"

    def _expr(self, expr: Expr) -> str:
        if expr in self._known:
            return self._known[expr]
        match expr:
            case Const():
                text = repr(expr.value)
            case Load():
                text = f"{self._buffer(expr.buffer)}[{', '.join(self._index(i) for i in expr.index)}]"
            case FromIndex():
                text = f"index {self._index(expr.index)}"
            case Call():
                text = f"{expr.op}({', '.join(self._expr(argument) for argument in expr.args)})"
            case _:
                raise TypeError(f"not an expression of the loops language: {expr!r}")
        text = f"{text}: {expr.dtype}"
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = f"%{len(self._lines)}"
            self._lines.append(f"{number} = {text}")
        self._known[expr] = number
        return number

    def _index(self, index: Index) -> str:
        terms = []
        for atom, coefficient in index.terms:
            match atom:
                case LoopVar():
                    text = self._var(atom)
                case FloorDiv():
                    text = f"({self._index(atom.numerator)}) // {self._dim(atom.divisor)}"
                case Mod():
                    text = f"({self._index(atom.numerator)}) % {self._dim(atom.divisor)}"
                case Scalar():
                    text = f"{self._expr(atom.expr)} in {atom.low}..{self._dim(atom.high)}"
            terms.append(f"{self._dim(coefficient)}*[{text}]")
        return " + ".join([*sorted(terms), self._dim(index.const)])

    def _dim(self, size: Dim) -> str:
        return render(size, self._sizes.__getitem__)
