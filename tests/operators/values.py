"""Inputs and outputs of operators as trees of tensors: copying, comparing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_map

from torch_hybrid_backend.core.lazy_bits import LazyBits

# (relative, absolute): what `torch.testing` takes for equal.
CLOSE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.complex128: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex32: (1e-3, 1e-5),
}
# Where there is no float64 result to judge by. Kernels sum in another order than eager, and functions differ in the last places.
LOOSE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (4e-3, 2e-3),
    torch.bfloat16: (2e-2, 1e-2),
    torch.complex128: (1e-7, 1e-7),
    torch.complex64: (1e-4, 1e-5),
    torch.complex32: (4e-3, 2e-3),
}
# Units in the last place, of the value and of the values' root mean square, that a result may be off beside twice eager's largest error.
UNITS = 4


def seed() -> None:
    """Every generator that samples and random operators draw from, set to the same state."""
    # torch.manual_seed would queue a call for CUDA, with a traceback, each time.
    torch.default_generator.manual_seed(20)
    random.seed(20)
    numpy.random.seed(20)


def copied(tree: Any) -> Any:
    """The same values in memory of their own, strides, lazy bits and `requires_grad` kept."""
    return tree_map(lambda leaf: _copy(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor or plain.layout != torch.strided or plain.is_quantized or not plain.numel():
        copy = plain.clone()
    else:
        span = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))
        storage = torch.as_strided(LazyBits().view_of(plain), (span,), (1,)).clone()
        copy = LazyBits.of(plain).view_of(torch.as_strided(storage, plain.shape, plain.stride(), 0))
    return copy.requires_grad_(tensor.requires_grad)


def lazy(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view with a lazy bit: conjugated, or negated where they are real. Of its own memory, with its `requires_grad`."""
    plain = tensor.detach()
    copy = LazyBits(conjugate=plain.is_complex(), negative=not plain.is_complex()).copy_of(plain)
    return copy.requires_grad_(tensor.requires_grad)


def widened(tree: Any) -> Any:
    """The same tree with floating-point tensors and dtype arguments in float64, complex tensors in complex128."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_complex:
            return leaf.detach().to(torch.complex128).requires_grad_(leaf.requires_grad)
        return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

    return tree_map(widen, tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def difference(actual: Any, expected: Any, exact: Callable[[], Any] = lambda: None) -> str:
    """The difference of the results, "" where nothing does.

    Integers and booleans must be equal. A floating-point result that is not close to eager's must be about as near as eager's to
    `exact()`, the result of a float64 run (`_worse`).
    """
    got, got_form = tree_flatten(actual)
    want, want_form = tree_flatten(expected)
    if got_form != want_form:
        return f"the result is a {got_form}, eager's {want_form}"
    ideal: list[Any] | None = None
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or repr(a) != repr(b):
                return f"output {position} is {a!r}, eager's {b!r}"
            continue
        if form := form_difference(a, b):
            return f"output {position} {form}"
        why = _unlike(a.detach(), b.detach(), CLOSE)
        if why and (b.dtype.is_floating_point or b.dtype.is_complex):
            if ideal is None:
                reference = exact()
                ideal = tree_flatten(reference)[0] if reference is not None else [None] * len(want)
            true = ideal[position] if position < len(ideal) else None
            if isinstance(true, torch.Tensor) and true.shape == a.shape and b.dtype.is_floating_point:
                why = _worse(a.detach(), b.detach(), true.detach())
            else:
                why = _unlike(a.detach(), b.detach(), LOOSE)
        if why:
            return f"output {position}: {why}"
    return ""


def form_difference(actual: object, expected: torch.Tensor) -> str:
    """The difference in dtype, shape, layout or lazy bits; "" where they do not."""
    if not isinstance(actual, torch.Tensor):
        return f"is a {type(actual).__name__}"
    if (actual.dtype, actual.shape, actual.layout) != (expected.dtype, expected.shape, expected.layout):
        return (
            f"is {actual.dtype} {tuple(actual.shape)} {actual.layout}, "
            f"eager's {expected.dtype} {tuple(expected.shape)} {expected.layout}"
        )
    if not LazyBits.of(expected).are_of(actual):
        return f"has {LazyBits.of(actual)}, eager's {LazyBits.of(expected)}"
    return ""


def _unlike(actual: torch.Tensor, expected: torch.Tensor, tolerances: Mapping[torch.dtype, tuple[float, float]]) -> str:
    rtol, atol = tolerances.get(expected.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def _worse(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> str:
    """The excess of the error over eager's, from the float64 result; "" where no element is materially so."""
    rounded = exact.to(expected.dtype)
    got, want, true = actual.double(), expected.double(), exact.double()
    same = (actual == expected) | (actual.isnan() & expected.isnan()) | (actual == rounded)
    same |= actual.isnan() & rounded.isnan()
    finite = true.isfinite() & want.isfinite()
    eager_error = (want - true).abs().masked_fill(~finite, 0).max()
    scale = true.masked_fill(~true.isfinite(), 0).square().mean().sqrt()
    eps = torch.finfo(expected.dtype).eps
    allowed = 2 * eager_error + UNITS * eps * (true.abs() + scale)
    error = (got - true).abs()
    wrong = ~same & ~(error <= allowed)  # NaN is never within
    if not wrong.any():
        return ""
    at = int(torch.where(wrong, error.nan_to_num(math.inf), -1.0).argmax())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements; the worst is {got.flatten()[at]:.9g}, eager's {want.flatten()[at]:.9g}, "
        f"in float64 {true.flatten()[at]:.9g}; eager's largest error {eager_error:.3g}"
    )
