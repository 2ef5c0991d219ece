"""Parts that all reductions share: the dimensions, the result's shape, and one primitive reduction as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_hybrid_backend.loops.index import Index, as_index
from torch_hybrid_backend.loops.ir import Expr, ScalarFn, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.lowerings.views import axis, reshaped
from torch_hybrid_backend.loops.ops import add, call, cast, const, div, mul, sub
from torch_hybrid_backend.sizes.size import Dim, product

Axes = int | Sequence[int] | None


def axes_of(dim: Axes, rank: int) -> tuple[int, ...]:
    """The reduced dimensions, ascending; None or an empty list means all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(rank))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted({axis(d, rank) for d in dims})) if rank else ()


def extent(shape: tuple[Dim, ...], axes: tuple[int, ...]) -> Dim:
    """Number of elements that are reduced to one."""
    return product(shape[d] for d in axes)


def kept_shape(shape: tuple[Dim, ...], axes: tuple[int, ...], keepdim: bool) -> tuple[Dim, ...]:
    """The result's shape."""
    return tuple(1 if d in axes else n for d, n in enumerate(shape) if keepdim or d not in axes)


def reduced(
    ctx: Context,
    combiner: str,
    x: Value,
    axes: tuple[int, ...],
    fn: Callable[[Expr], Expr] | None = None,
    dtype: str | None = None,
    keepdim: bool = False,
) -> Value:
    """fn(x) reduced over `axes`; `fn` gets and gives compute-dtype scalars. Statistics (dtype None) keep the compute dtype of x."""
    dtype = dtype or compute_dtype(x.dtype)

    def body(index: tuple[Index, ...]) -> Expr:
        scalar = x.at(index)
        return scalar if fn is None else fn(scalar)

    return reduced_body(ctx, combiner, x, axes, body, dtype, keepdim)


def reduced_body(
    ctx: Context, combiner: str, x: Value, axes: tuple[int, ...], body: ScalarFn, dtype: str, keepdim: bool = False
) -> Value:
    """`body` over the shape of x, reduced; a tensor without dimensions is its own reduction."""
    shape = kept_shape(x.shape, axes, keepdim)
    if axes:
        return reshaped(ctx.reduce(combiner, x, axes, body, dtype), shape)
    if combiner in ("argmax", "argmin"):
        return ctx.pointwise(lambda: const(0, "int64"), dtype=dtype, shape=shape)
    return ctx.pointwise(lambda _: cast(body(()), compute_dtype(dtype)), x, dtype=dtype, shape=shape)


def moments(ctx: Context, x: Value, axes: tuple[int, ...]) -> tuple[Value, Value]:
    """Mean and sum of squared deviations over `axes`, of the shape with 1 for them, in the compute dtype of x.

    Two passes, the second corrected by the sum of the deviations, which is 0 but for the rounding of the mean: numbers far from zero, such as
    time stamps, are nearer to one another than to a mean that is rounded. Source: Chan, Golub and LeVeque, "Algorithms for
    computing the sample variance", 1983, (1.7). Not where both passes are one reading (`Abilities.joined_moments`).
    """
    dtype = compute_dtype(x.dtype)
    shape = kept_shape(x.shape, axes, keepdim=True)
    count = extent(x.shape, axes)
    total = reduced(ctx, "sum", x, axes, keepdim=True)
    average = ctx.pointwise(lambda a: div(a, lit(a, count)), total, dtype=dtype, shape=shape)

    def deviation(index: tuple[Index, ...]) -> Expr:
        return sub(x.at(index), average.at(tuple(as_index(0) if d in axes else i for d, i in enumerate(index))))

    def squared(index: tuple[Index, ...]) -> Expr:
        off = deviation(index)
        return mul(off, off)

    squares = reduced_body(ctx, "sum", x, axes, squared, dtype, keepdim=True)
    if ctx.abilities.joined_moments:
        return average, squares
    left = reduced_body(ctx, "sum", x, axes, deviation, dtype, keepdim=True)

    def moved(a: Expr, b: Expr) -> Expr:
        return add(a, div(b, lit(a, count)))

    def corrected(a: Expr, b: Expr) -> Expr:
        # Rounding may not make it negative.
        return call("max", sub(a, div(mul(b, b), lit(a, count))), lit(a, 0))

    centre = ctx.pointwise(moved, average, left, dtype=dtype, shape=shape)
    return centre, ctx.pointwise(corrected, squares, left, dtype=dtype, shape=shape)
