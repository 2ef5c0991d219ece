"""Scales behind sums of integers, multiplied together.

A sum of integers is multiplied by the scales of both operands, by a batch norm's factor, and by what it is quantized with again, with a shift
and a ReLU in between. Each is one more instruction for every element of the result, where products of the sums' own take a sixteenth of one:

    clamp(((sum * s) * t[c]) * f[c] + b[c], 0, 6) * r  =  clamp(sum * (s t[c] f[c] r) + (b[c] r), 0, 6 r)

What depends on the column alone is computed once for many rows, by the schedule. Results differ by the roundings of float32, so a number that
is quantized again may be the neighbouring integer, where it was halfway between two.
Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import LoopVar
from torch_hybrid_backend.loops.ir import Buffer, Call, Const, Expr, FromIndex, Load, parts
from torch_hybrid_backend.loops.kernels import Store

Test = Callable[[Expr], bool]


def gathered(stores: Sequence[Store], accumulator: Buffer, column: LoopVar) -> tuple[Store, ...]:
    """The stores of what an integer `accumulator` becomes, with the factors of a float32 that is made of it multiplied together."""
    if accumulator.dtype != "int32":
        return tuple(stores)
    return tuple(dataclasses.replace(store, value=_gathered(store.value, accumulator, column)) for store in stores)


def depends_on_column_alone(e: Expr, column: LoopVar) -> bool:
    """True if an expression is the same in all rows: made of literals, of the column's number, and of what is loaded by it."""
    for part in parts([e]):
        match part:
            case Load(_, _, index):
                if not all(atom == column for place in index for atom, _ in place.terms):
                    return False
            case FromIndex(_, index):
                if not all(atom == column for atom, _ in index.terms):
                    return False
    return True


def _gathered(value: Expr, accumulator: Buffer, column: LoopVar) -> Expr:
    done: dict[Expr, Expr] = {}

    def has_sums(e: Expr) -> bool:
        return any(isinstance(part, Load) and part.buffer is accumulator for part in parts([e]))

    def is_factor(e: Expr) -> bool:
        return depends_on_column_alone(e, column) and not has_sums(e)

    def visit(e: Expr) -> Expr:
        if e not in done:
            done[e] = rewritten(e)
        return done[e]

    def rewritten(e: Expr) -> Expr:
        if not isinstance(e, Call) or not has_sums(e):
            return e
        args = tuple(visit(a) for a in e.args)
        if e.op == "mul" and e.dtype == "float32":
            first, second = args
            if is_factor(second):
                return _scaled(first, second, is_factor)
            if is_factor(first):
                return _scaled(second, first, is_factor)
        return e.with_args(args)

    return visit(value)


def _scaled(e: Expr, factor: Expr, is_factor: Test) -> Expr:
    """e * factor, multiplied as far inside as that costs nothing."""
    match e:
        case Call("float32", "mul", (first, second)) if is_factor(second):
            return _scaled(first, _product(second, factor), is_factor)
        case Call("float32", "mul", (first, second)) if is_factor(first):
            return _scaled(second, _product(first, factor), is_factor)
        case Call("float32", "add", (first, second)):
            return ops.add(_scaled(first, factor, is_factor), _scaled(second, factor, is_factor))
        case Call("float32", "max" | "min" as op, (first, Const() as limit)) if _is_positive(factor):
            return ops.call(op, _scaled(first, factor, is_factor), _product(limit, factor))
    return _product(e, factor) if is_factor(e) else ops.mul(e, factor)


def _is_positive(factor: Expr) -> bool:
    return isinstance(factor, Const) and 0 < factor.value < math.inf


def _product(a: Expr, b: Expr) -> Expr:
    if isinstance(a, Const) and isinstance(b, Const):
        return ops.literal(a.value * b.value, "float32")
    return ops.mul(a, b)
