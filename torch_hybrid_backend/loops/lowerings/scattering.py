"""Scatter-add and its like, for lowerings of scatters and of gradients: many points of one domain write to elements of another.

Sums of half types and of narrow integers are held in float32 and int32, so that many of them lose nothing and each is one atomic operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import Buffer, Expr, InverseFn, Map, ScalarFn, ScatterOp, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse
from torch_hybrid_backend.loops.ops import call, cast, const, div, is_float, where
from torch_hybrid_backend.sizes.size import Dim

# What elements are held in while they are combined, where that is not the dtype itself.
_HELD: Mapping[str, str] = {
    **dict.fromkeys(("float16", "bfloat16"), "float32"),
    **dict.fromkeys(("bool", "uint8", "int8", "int16"), "int32"),
}
_COMBINERS: Mapping[str, str] = {"sum": "sum", "mean": "sum", "amax": "max", "amin": "min"}
_SCALAR_OPS: Mapping[str, str] = {"sum": "add", "max": "max", "min": "min"}


def scattered(
    ctx: Context,
    base: Value,
    domain: tuple[Dim, ...],
    place: InverseFn,
    body: ScalarFn,
    combiner: str,
    *,
    ordered: bool = False,
) -> Value:
    """`base`, every point of `domain` combined with the element at its place: see `ScatterOp`. `ordered`: no order changes the result.

    Refuses if kernels cannot scatter, or if the result would depend on an order and must not.
    """
    _check(ctx, base.dtype, combiner, ordered)
    if combiner == "write":
        return ctx.realize(ScatterOp(Buffer(base.shape, base.dtype), base, domain, place, body, combiner))
    held = _HELD.get(base.dtype, base.dtype)
    wide = _cast(base, held)
    # Atomic operations compare floats as integers, and know no NaN of a tensor's: those are combined here.
    apart = combiner != "sum" and is_float(held)
    start = filled(ctx, -math.inf if combiner == "max" else math.inf, base.shape, held) if apart else wide
    result = ctx.realize(
        ScatterOp(Buffer(base.shape, held), start, domain, place, lambda i: cast(body(i), held), combiner)
    )
    if not apart:
        return _cast(result, base.dtype)

    def at(i: tuple[Index, ...]) -> Expr:
        return cast(call(_SCALAR_OPS[combiner], wide.at(i), result.at(i)), compute_dtype(base.dtype))

    return Map(base.shape, base.dtype, at, ((base, _same), (result, _same)))


def reduced(
    ctx: Context,
    x: Value,
    domain: tuple[Dim, ...],
    place: InverseFn,
    body: ScalarFn,
    reduce: str,
    include_self: bool,
) -> Value:
    """x combined by ATen's "sum", "mean", "amax" or "amin". Without `include_self`, elements that points write to ignore x."""
    combiner = _COMBINERS.get(reduce)
    if combiner is None:
        raise Refuse(Reason.ARGUMENT, f"a scatter that combines by {reduce!r} is left to eager")
    if x.dtype == "bool":
        raise Refuse(Reason.DTYPE, "scatters that combine bool are left to eager")
    if include_self and reduce != "mean":
        return scattered(ctx, x, domain, place, body, combiner)
    one = const(1, "int32")
    count = scattered(ctx, filled(ctx, int(include_self), x.shape, "int32"), domain, place, lambda i: one, "sum")
    start = x if include_self else filled(ctx, _neutral(combiner, x.dtype), x.shape, x.dtype)
    found = scattered(ctx, start, domain, place, body, combiner)
    dtype = compute_dtype(x.dtype)

    def at(i: tuple[Index, ...]) -> Expr:
        points, result = count.at(i), found.at(i)
        if reduce == "mean":
            divisor = cast(call("max", points, one), dtype)
            result = div(result, divisor) if is_float(dtype) else call("floordiv", result, divisor)
        return result if include_self else where(call("gt", points, const(0, "int32")), result, x.at(i))

    return Map(x.shape, x.dtype, at, ((x, _same), (count, _same), (found, _same)))


def filled(ctx: Context, number: float, shape: tuple[Dim, ...] | None = None, dtype: str = "") -> Map:
    """A value filled with one number, of the shape and dtype of the node's result by default."""
    dtype = dtype or ctx.out.dtype
    value = const(number, compute_dtype(dtype))
    return Map(ctx.shape if shape is None else shape, dtype, lambda _: value)


def _check(ctx: Context, dtype: str, combiner: str, ordered: bool) -> None:
    scatters = ctx.abilities.scatters
    if scatters == "none":
        raise Refuse(
            Reason.ARGUMENT,
            "a scatter of many elements is left to eager: kernels here cannot write to one place at once",
        )
    ordered = ordered or combiner in ("max", "min") or (combiner == "sum" and not is_float(compute_dtype(dtype)))
    if scatters == "ordered" and not ordered:
        raise Refuse(
            Reason.NONDETERMINISTIC,
            "the order in which a scatter writes would decide its result, and torch.use_deterministic_algorithms is on",
        )


def _neutral(combiner: str, dtype: str) -> float:
    if combiner == "sum":
        return 0
    if is_float(compute_dtype(dtype)):
        return -math.inf if combiner == "max" else math.inf
    limits = torch.iinfo(getattr(torch, dtype))
    return limits.min if combiner == "max" else limits.max


def _cast(value: Value, dtype: str) -> Value:
    """The value in another dtype."""
    if value.dtype == dtype:
        return value
    return Map(value.shape, dtype, lambda i: cast(value.at(i), compute_dtype(dtype)), ((value, _same),))


def _same(index: tuple[Index, ...]) -> tuple[Index, ...]:
    return index
