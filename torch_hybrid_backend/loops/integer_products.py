"""Quantised operands of products: which integers an operand is made of, whatever operators it came about by.

A quantised operand is a value `(cast(q) - zero) * scale`, q of 8 bits. An operand says what it is by what it computes, so views, permutations
and different spellings of dequantisation are all one case.
Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.loops import ops as scalar
from torch_hybrid_backend.loops.ir import Call, Const, Expr, Value, domain_vars

NARROW = ("int8", "uint8")


@dataclass(frozen=True, slots=True)
class Affine:
    """(cast(`integer`) - `zero`) * the product of `scales`; `zero` of 0 is None."""

    integer: Expr
    zero: Expr | None
    scales: tuple[Expr, ...]


def affine(e: Expr) -> Affine | None:
    """A scalar as an integer of 8 bits, moved and scaled; None where it is none."""
    if e.dtype in NARROW:
        return Affine(e, None, ())
    if not isinstance(e, Call):
        return None
    match e.op:
        case "cast":
            inner = affine(e.args[0])
            # To fewer bits or to an integer, a cast may change the number.
            is_exact = scalar.is_float(e.dtype) or not scalar.is_float(e.args[0].dtype)
            return inner if is_exact and e.dtype != "bool" else None
        case "round":  # to a narrower float: a step of eager's that need not be taken
            return affine(e.args[0])
        case "mul":
            for one, other in (e.args, e.args[::-1]):
                if scalar.is_float(e.dtype) and (inner := affine(one)) is not None:
                    return Affine(inner.integer, inner.zero, (*inner.scales, other))
        case "sub":
            inner = affine(e.args[0])
            if inner is not None and inner.zero is None and not inner.scales:
                zero = _whole(e.args[1])
                if zero is not None:
                    is_none = isinstance(zero, Const) and zero.value == 0
                    return Affine(inner.integer, None if is_none else zero, ())
    return None


def _whole(zero: Expr) -> Expr | None:
    """A zero point as an int32 scalar; None where it need not be a whole number."""
    if isinstance(zero, Const):
        return scalar.literal(int(zero.value), "int32") if float(zero.value).is_integer() else None
    while isinstance(zero, Call) and zero.op == "cast":
        zero = zero.args[0]
    return scalar.cast(zero, "int32") if zero.dtype in ("int8", "uint8", "int16", "int32", "int64") else None


def is_dequantised(value: Value) -> bool:
    """Whether a value is cheaper to compute where it is read than to keep: an integer of 8 bits, moved and scaled."""
    return value.dtype not in NARROW and affine(value.at(domain_vars(value.shape))) is not None
