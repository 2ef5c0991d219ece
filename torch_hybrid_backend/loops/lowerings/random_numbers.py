"""Operators that draw random numbers: the numbers that eager draws on the same GPU, from the same state of its generator.

Operators with a tensor of parameters (bernoulli of a tensor), by rejection (poisson) or one number after the other (multinomial) stay with
eager, and so do those that are given another generator than the default one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.loops.index import Index, linear
from torch_hybrid_backend.loops.ir import Expr, Map, Value, compute_dtype
from torch_hybrid_backend.loops.lowering import Context, Refuse, lowers
from torch_hybrid_backend.loops.ops import call, cast, const, mul, round_to, where
from torch_hybrid_backend.loops.random_numbers import Draw
from torch_hybrid_backend.sizes.size import Dim, Size, divide, product, size_hint

aten = torch.ops.aten

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_VECTOR_BYTES = 16  # what one thread of the dropout kernel reads at once
_MOST_BYTES = (1 << 31) - 1  # of a result: PyTorch draws larger ones piece by piece


@lowers(aten.rand.default, aten.rand_like.default)
def rand(ctx: Context, *_arguments: object, **_options: object) -> Value:
    return _uniform(ctx, 0.0, 1.0)


@lowers(aten.uniform.default)
def uniform(ctx: Context, x: Value, low: float = 0.0, high: float = 1.0, *, generator: object = None) -> Value:
    _default(generator)
    return _uniform(ctx, low, high)


def _uniform(ctx: Context, low: float, high: float) -> Value:
    """Numbers in [low, high): cuRAND's are in (0, 1], and a number that rounds to `high` becomes `low`."""
    dtype = ctx.out.torch_dtype
    begin, end = (torch.tensor(bound, dtype=dtype, device=str(CPU)) for bound in (low, high))
    compute = compute_dtype(ctx.out.dtype)
    start, stop, extent = (const(bound.item(), compute) for bound in (begin, end, end - begin))

    def transformed(number: Expr) -> Expr:
        value = round_to(call("fma", number, extent, start), ctx.out.dtype)
        return where(call("eq", value, stop), start, value)

    return _drawn(ctx, "random_uniform", transformed)


@lowers(aten.randn.default, aten.randn_like.default)
def randn(ctx: Context, *_arguments: object, **_options: object) -> Value:
    return _normal(ctx, 0.0, 1.0)


@lowers(aten.normal_functional.default)
def normal(ctx: Context, x: Value, mean: float = 0.0, std: float = 1.0, *, generator: object = None) -> Value:
    _default(generator)
    return _normal(ctx, mean, std)


def _normal(ctx: Context, mean: float, std: float) -> Value:
    if ctx.out.dtype == "float64":
        raise Refuse(Reason.RANDOM, "normally distributed numbers are drawn in float32 and below, not in float64")
    middle, spread = const(mean, "float32"), const(std, "float32")
    return _drawn(ctx, "random_normal", lambda number: call("fma", number, spread, middle))


@lowers(aten.bernoulli.p)
def bernoulli(ctx: Context, x: Value, p: float = 0.5, *, generator: object = None) -> Value:
    """1 where a number in (0, 1] is below p."""
    _default(generator)
    drawn = "float64" if ctx.out.dtype == "float64" else "float32"
    compute = compute_dtype(ctx.out.dtype)
    return _drawn(ctx, "random_uniform", lambda number: cast(call("lt", number, const(p, drawn)), compute))


@lowers(aten.native_dropout.default)
def native_dropout(ctx: Context, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    """(x * kept / (1 - p), kept): `kept` is True where a number in (0, 1] is below 1 - p, and everywhere if `train` is False."""
    if train is False:
        kept = Map(ctx.shape, "bool", lambda index: const(True, "bool"))
        return ctx.pointwise(lambda a: a, x), kept
    if p == 1:
        _blocks(ctx)  # on a GPU nothing is drawn for it, on the CPU as much as for any other
        nothing = Map(ctx.shape, "bool", lambda index: const(False, "bool"))
        return Map(ctx.shape, x.dtype, lambda index: const(0.0, compute_dtype(x.dtype))), nothing
    given = _argument(ctx)
    draw, positions = _dropout_draw(ctx, given)
    accumulate = compute_dtype(x.dtype)
    keep = 1.0 - p
    limit = const(keep, accumulate)
    scale = const(1.0 / float(torch.tensor(keep, dtype=getattr(torch, accumulate), device=str(CPU))), accumulate)

    def is_kept(index: tuple[Index, ...]) -> Expr:
        # Whatever the dtype, the kernel draws float32.
        number = draw.at("random_uniform", "float32", linear(index, positions))
        return call("lt", cast(number, accumulate), limit)

    mask = Map(ctx.shape, "bool", is_kept)
    # A product, as in eager: of infinities and NaN, dropped or not, it makes NaN.
    return ctx.pointwise(lambda a, kept: mul(mul(a, kept), scale), x, mask), mask


def _dropout_draw(ctx: Context, given: torch.Tensor) -> tuple[Draw, tuple[Dim, ...]]:
    """The numbers of PyTorch's dropout of a (fake) tensor, and the strides by which an element's position follows from its index.

    A thread takes as many neighbours as 16 bytes hold, or fewer where the tensor's first element or its size is no multiple of that. Memory
    of a tensor begins at a multiple of 16 bytes: that of PyTorch's allocator does.
    """
    spec = TensorSpec.of(given)
    offset, numel = given.storage_offset(), product(spec.shape)
    if not isinstance(offset, int):
        raise Refuse(
            Reason.SYMBOLIC_SHAPE,
            "where the tensor begins in memory, on which dropout depends, is only known at run time",
        )
    is_dense = _is_dense(spec.shape, spec.strides)
    if not is_dense and any(isinstance(size, Size) for size in (*spec.shape, *spec.strides)):
        raise Refuse(
            Reason.SYMBOLIC_SHAPE,
            "whether the tensor has gaps in memory, on which dropout depends, is only known at run time",
        )
    vector = _VECTOR_BYTES // given.element_size() if is_dense else 1
    while vector > 1 and (offset % vector != 0 or not _divides(vector, numel)):
        vector //= 2
    draw = ctx.generator.draw(numel, _blocks(ctx), vector=vector)
    if vector > 1:
        return draw, spec.strides
    # One by one the elements are taken row by row, however they lie.
    rows: list[Dim] = [1]
    for extent in reversed(spec.shape[1:]):
        rows.insert(0, rows[0] * extent)
    return draw, tuple(rows[: len(spec.shape)])


def _divides(vector: int, numel: Dim) -> bool:
    rest = divide(numel, vector)[1]
    if isinstance(rest, Size):
        raise Refuse(
            Reason.SYMBOLIC_SHAPE,
            f"whether {numel} elements are a multiple of {vector}, on which dropout depends, is only known at run time",
        )
    return rest == 0


def _drawn(ctx: Context, op: str, transformed: Callable[[Expr], Expr]) -> Value:
    """A result of one random number for each element, which `transformed` makes the element's value."""
    out = ctx.out
    if out.dtype not in _FLOATS:
        raise Refuse(Reason.DTYPE, f"random numbers are drawn in {', '.join(_FLOATS)}, not in {out.dtype}")
    if not _is_dense(out.shape, out.strides):
        raise Refuse(Reason.RANDOM, f"a result with strides {out.strides} for the shape {out.shape} has gaps")
    numel = product(out.shape)
    if not isinstance(numel, int) or numel * out.torch_dtype.itemsize > _MOST_BYTES:
        raise Refuse(Reason.RANDOM, f"a result must be known to have at most {_MOST_BYTES} bytes")
    is_double = out.dtype == "float64"
    draw = ctx.generator.draw(numel, _blocks(ctx), per_group=2 if is_double else 4)
    dtype = "float64" if is_double else "float32"
    return Map(out.shape, out.dtype, lambda index: transformed(draw.at(op, dtype, linear(index, out.strides))))


def _argument(ctx: Context) -> torch.Tensor:
    """The node's first argument as a fake tensor."""
    assert ctx.node is not None
    (source, *_) = ctx.node.all_input_nodes
    value = source.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _blocks(ctx: Context) -> int:
    blocks = ctx.abilities.random_blocks
    if blocks == 0:
        raise Refuse(Reason.RANDOM, f"the kernels cannot draw the random numbers that eager draws on {ctx.out.device}")
    return blocks


def _default(generator: object) -> None:
    if generator is not None:
        raise Refuse(Reason.RANDOM, "a generator is given: kernels draw from the device's default one")


def _is_dense(shape: tuple[Dim, ...], strides: tuple[Dim, ...]) -> bool:
    """True if the elements fill memory without gaps, in whatever order of dimensions."""
    expected: Dim = 1
    for extent, stride in sorted(
        zip(shape, strides, strict=True), key=lambda pair: (size_hint(pair[1]), size_hint(pair[0]))
    ):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected = expected * extent
    return True
