"""Reductions, softmax and normalisations against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loops.check import EVERYTHING, FLOATS, NUMBERS, check, sample, with_specials

aten = torch.ops.aten

DIMS = {"all": None, "last": [-1], "first": [0], "two": [0, 2], "none given": []}


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("keepdim", [False, True])
def test_dimensions(dims: str, keepdim: bool) -> None:
    """Dimensions count from either end; None and [] mean all; keepdim leaves ones."""
    x, dim = sample(3, 4, 5), DIMS[dims]
    check(lambda a: aten.sum.dim_IntList(a, dim, keepdim), x)
    check(lambda a: aten.mean.dim(a, dim, keepdim), x)
    check(lambda a: aten.amax.default(a, dim or [], keepdim), x)
    check(lambda a: aten.amin.default(a, dim or [], keepdim), x)
    check(lambda a: aten.var.correction(a, dim, correction=1, keepdim=keepdim), x)
    check(lambda a: aten.var_mean.correction(a, dim, correction=0, keepdim=keepdim), x)
    check(lambda a: aten.any.dims(a, dim, keepdim), x)
    check(lambda a: aten.linalg_vector_norm.default(a, 2, dim, keepdim), x)
    if dim:
        check(lambda a: aten.logsumexp.default(a, dim, keepdim), x)


@pytest.mark.parametrize("dtype", EVERYTHING, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    """Sums and products of integers and booleans are int64; extrema keep the dtype; truth is bool (uint8 of uint8)."""
    x = sample(3, 7, dtype=dtype, low=-2, high=2)
    check(lambda a: aten.sum.dim_IntList(a, [1]), x)
    check(aten.sum.default, x)
    check(lambda a: aten.prod.dim_int(a, 1), x)
    check(aten.prod.default, x)
    check(lambda a: aten.amax.default(a, [1]), x)
    check(lambda a: aten.amin.default(a, [0]), x)
    check(aten.max.default, x)
    check(aten.min.default, x)
    check(aten.any.default, x)
    check(lambda a: aten.any.dim(a, 1), x)
    check(lambda a: aten.all.dim(a, -1, True), x)
    check(lambda a: aten.all.dims(a, []), x)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_positions(dtype: torch.dtype) -> None:
    """argmax and argmin give the first of equals; max.dim gives value and place."""
    x = torch.tensor([[1, 3, 3, 2], [0, 0, -1, -1], [2, 2, 2, 2]], dtype=dtype)
    for name in ("argmax", "argmin"):
        check(getattr(aten, name).default, x)
        check(_along(getattr(aten, name).default, 1), x)
        check(_along(getattr(aten, name).default, 0, True), x)
    check(lambda a: aten.max.dim(a, 1), x)
    check(lambda a: aten.min.dim(a, -1, True), x)
    check(lambda a: aten.max.dim(a, 0)[1], x)


def _along(target: Callable[..., object], *arguments: object) -> Callable[[torch.Tensor], object]:
    return lambda x: target(x, *arguments)


def test_nan_wins() -> None:
    """Extrema of rows with NaN are NaN, and its place is found."""
    x = with_specials(sample(4, 5))
    check(lambda a: aten.amax.default(a, [1]), x)
    check(lambda a: aten.amin.default(a, [1]), x)
    check(lambda a: aten.max.dim(a, 1), x)
    check(lambda a: aten.argmin.default(a, 1), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_no_dimensions(dtype: torch.dtype) -> None:
    """A tensor without dimensions is its own reduction."""
    x = torch.ones((), dtype=dtype)
    for fn in (aten.sum.default, aten.prod.default, aten.amax.default, aten.any.default):
        check(fn, x)
    if dtype != torch.bool:
        check(aten.argmax.default, x)
    check(lambda a: aten.sum.dim_IntList(a, [0]), x)
    check(lambda a: aten.max.dim(a, 0), x)
    if dtype.is_floating_point:
        check(aten.mean.default, x)
        check(lambda a: aten.linalg_vector_norm.default(a, 3), x)
        check(lambda a: aten._softmax.default(a, 0, False), x)
        check(lambda a: aten.logsumexp.default(a, [0]), x)
        check(lambda a: aten.var_mean.correction(a, [0], correction=0), x)


def test_requested_dtypes() -> None:
    """dtype= accumulates in that dtype."""
    check(lambda a: aten.sum.dim_IntList(a, [0], dtype=torch.float64), sample(9, 2))
    check(lambda a: aten.sum.default(a, dtype=torch.float32), sample(9, dtype=torch.int64))
    check(lambda a: aten.mean.dim(a, [0], dtype=torch.float64), sample(9, 2, dtype=torch.bfloat16))
    check(lambda a: aten.sum.default(a, dtype=torch.bool), sample(9))
    check(lambda a: aten.linalg_vector_norm.default(a, 2, dtype=torch.float64), sample(9))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_variance(dtype: torch.dtype) -> None:
    """Any correction; too few elements give what eager gives; a large mean does not cancel."""
    x = sample(4, 6, dtype=dtype)
    check(lambda a: aten.var.correction(a, [1], correction=0.5), x)
    check(lambda a: aten.var.correction(a, [1]), x)
    check(lambda a: aten.var.correction(a, [1], correction=9), x)
    check(lambda a: aten.std.correction(a, None, correction=1), x)
    check(lambda a: aten.std_mean.correction(a, [0], correction=1), x)
    check(lambda a: aten.var.dim(a, [1], False), x)
    check(lambda a: aten.var.correction(a, [1], correction=1), sample(4, 1, dtype=dtype))
    if dtype in (torch.float32, torch.float64):
        check(lambda a: aten.var.correction(a, [1], correction=1), x + 1e4)


@pytest.mark.parametrize("order", [0, 1, 2, 3, -1, 0.5, float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms(order: float, dtype: torch.dtype) -> None:
    """Vector norms of every order."""
    check(lambda a: aten.linalg_vector_norm.default(a, order, [1]), sample(3, 8, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(dtype: torch.dtype, dim: int) -> None:
    """Rows along any dimension; rows of -inf are NaN in softmax, 0 in the safe one."""
    x = sample(3, 5, 4, dtype=dtype, low=-20, high=20)
    x[0, 0, :] = float("-inf")
    x[1, 1, 2] = float("-inf")
    check(lambda a: aten._softmax.default(a, dim, False), x)
    check(lambda a: aten._log_softmax.default(a, dim, False), x)
    check(lambda a: aten._safe_softmax.default(a, dim), x)
    check(lambda a: aten.logsumexp.default(a, [dim]), x)


def test_softmax_to_other_dtypes() -> None:
    """safe_softmax converts first where it is told a dtype."""
    check(lambda a: aten._safe_softmax.default(a, -1, torch.float64), sample(3, 5))
    check(lambda a: aten.aminmax.default(a, dim=1), sample(3, 5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_backward(dtype: torch.dtype) -> None:
    """Gradients of softmax and log-softmax from their results."""
    g, x = sample(3, 5, dtype=dtype), sample(3, 5, dtype=dtype, seed=1)
    check(lambda a, b: aten._softmax_backward_data.default(a, b, 1, dtype), g, x.softmax(1))
    check(lambda a, b: aten._log_softmax_backward_data.default(a, b, -1, dtype), g, x.log_softmax(1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(dtype: torch.dtype, affine: bool) -> None:
    """Layer norm over one and two normalised dimensions, with statistics."""
    x, w, b = (sample(*s, dtype=dtype, seed=n) for n, s in enumerate([(2, 3, 4), (4,), (4,)]))
    if affine:
        check(lambda x, w, b: aten.native_layer_norm.default(x, [4], w, b, 1e-5), x, w, b)
    else:
        check(lambda x: aten.native_layer_norm.default(x, [3, 4], None, None, 1e-5), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 3, 2), (2, 6)])
def test_group_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Groups of channels, with and without weights."""
    x, w, b = sample(*shape, dtype=dtype), sample(6, dtype=dtype, seed=1), sample(6, dtype=dtype, seed=2)
    pixels = x[0, 0].numel()
    check(lambda x, w, b: aten.native_group_norm.default(x, w, b, 2, 6, pixels, 3, 1e-5), x, w, b)
    check(lambda x: aten.native_group_norm.default(x, None, None, 2, 6, pixels, 2, 1e-5), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_batch_norm_in_eval(dtype: torch.dtype) -> None:
    """Given statistics, with and without weights."""
    x, mean, w, b = sample(2, 3, 4, 5, dtype=dtype), *(sample(3, dtype=dtype, seed=n) for n in range(3))
    var = sample(3, dtype=dtype, low=0.5, high=2)
    norm = aten._native_batch_norm_legit_no_training.default
    check(lambda x, w, b, m, v: norm(x, w, b, m, v, 0.1, 1e-5)[0], x, w, b, mean, var)
    check(lambda x, m, v: norm(x, None, None, m, v, 0.1, 1e-5)[0], x, mean, var)
