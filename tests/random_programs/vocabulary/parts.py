"""Parts of the idioms: weights of a fitting size, layers with their norms and activations, views of views."""

from __future__ import annotations

import math

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, REDUCTION, SMOOTH
from tests.random_programs.scope import Scope, Step, Value
from tests.random_programs.vocabulary import shapes

ACTIVATIONS = (
    "F.relu({})",
    "F.silu({})",
    "F.gelu({})",
    "F.gelu({}, approximate='tanh')",
    "F.hardswish({})",
    "F.leaky_relu({}, 0.1)",
    "F.relu6({})",
    "F.mish({})",
    "torch.tanh({})",
    "{0} * torch.sigmoid(1.702 * {0})",
    "F.elu({})",
)
IN_PLACE = (
    "F.relu({}, inplace=True)",
    "F.silu({}, inplace=True)",
    "F.leaky_relu({}, 0.1, inplace=True)",
    "F.hardswish({}, inplace=True)",
)


def divisor(scope: Scope, n: int) -> int:
    return scope.draw.choose([k for k in range(1, n + 1) if n % k == 0] or [1])


def weight(scope: Scope, shape: list[int], dtype: torch.dtype, terms: int = 1) -> Value:
    """A new weight, mostly a parameter, so small that a sum of `terms` products stays about as large as what it is multiplied with."""
    scale = 2.0 ** -round(math.log2(max(1, terms)) / 2)
    return scope.fresh(shape, dtype, weight=not scope.draw.chance(6), layout="contiguous", scale=scale)


def linear(scope: Scope, x: Value, outputs: int, *, bias: bool | None = None) -> Value:
    inputs = x.shape[-1]
    text = f"F.linear({x}, {weight(scope, [outputs, inputs], x.dtype, inputs)}"
    if scope.draw.chance(2) if bias is None else bias:
        text += f", {weight(scope, [outputs], x.dtype)}"
    return scope.let(f"{text})", REDUCTION)


def activation(scope: Scope, x: Value) -> Value:
    """An activation of a value that the idiom has made: it may be written to."""
    if scope.draw.chance(4) and scope.is_writable(x):
        scope.several(scope.draw.choose(IN_PLACE).format(x), SMOOTH, 0)
        return x
    return scope.let(scope.draw.choose(ACTIVATIONS).format(x), SMOOTH)


def residual(scope: Scope, x: Value, y: Value) -> Value:
    """x + y, in place as well, where the shapes are equal; else y."""
    if x.shape != y.shape:
        return y
    if scope.draw.chance(4) and scope.is_writable(y) and x.dtype == y.dtype:
        scope.several(f"{y}.add_({x})", ARITHMETIC, 0)
        return y
    return scope.let(scope.draw.choose([f"{x} + {y}", f"{y} + {x}", f"({x} + {y}) / 1.5"]), ARITHMETIC)


def last_norm(scope: Scope, x: Value) -> Value:
    """Over the last dimension: layer norm, or RMS norm as PyTorch's operator and as models write it out."""
    channels = x.shape[-1]
    scale = weight(scope, [channels], x.dtype)
    form = scope.draw.integer(0, 3)
    if form <= 1:
        bias = f"{weight(scope, [channels], x.dtype)}" if form else "None"
        return scope.let(
            f"F.layer_norm({x}, ({channels},), {scale}, {bias}, {scope.draw.choose([1e-5, 1e-2])})", REDUCTION
        )
    if form == 2:
        return scope.let(f"F.rms_norm({x}, ({channels},), {scale}, 1e-2)", REDUCTION)
    wide = scope.let(f"{x}.to(float32)", ARITHMETIC)
    variance = scope.let(f"{wide}.pow(2).mean(-1, keepdim=True)", REDUCTION)
    normed = scope.let(f"{wide} * torch.rsqrt({variance} + 1e-2)", SMOOTH)
    return scope.let(f"{scale} * {normed}.to({x}.dtype)", ARITHMETIC)


def channel_norm(scope: Scope, x: Value) -> Value:
    """Over the channels of a picture or a sequence (batch, channels, ...): batch norm in both forms, group norm, instance norm."""
    channels, dtype = x.shape[1], x.dtype
    scale, shift = weight(scope, [channels], dtype), weight(scope, [channels], dtype)
    eps = scope.draw.choose([1e-5, 1e-3, 0.1])
    form = scope.draw.integer(0, 6)
    if form <= 1:
        mean, variance = weight(scope, [channels], dtype), weight(scope, [channels], dtype)
        return scope.let(
            f"F.batch_norm({x}, {mean}.detach(), {variance}.detach().abs() + 0.5, {scale}, {shift}, False, 0.1, {eps})",
            REDUCTION,
        )
    if form == 2:
        return scope.let(f"F.batch_norm({x}, None, None, {scale}, {shift}, True, 0.1, {eps})", REDUCTION)
    if form == 3:  # running statistics are written to: no weights
        mean, variance = (scope.fresh([channels], dtype, layout="contiguous") for _ in range(2))
        text = f"F.batch_norm({x}, {mean}, {variance}, {scale}, {shift}, True, 0.1, {eps})"
        return scope.let(text, REDUCTION, (mean.name, variance.name))
    if form == 4 and x.rank >= 3:
        return scope.let(f"F.instance_norm({x}, weight={scale}, bias={shift}, eps={eps})", REDUCTION)
    affine = scope.draw.choose([f"{scale}, {shift}", f"{scale}, {shift}", f"{scale}", "None"])
    return scope.let(f"F.group_norm({x}, {divisor(scope, channels)}, {affine}, eps={eps})", REDUCTION)


def views_of_views(scope: Scope) -> Step | None:
    """Views of a view of a view, and now and then what is done with the last one."""
    value = scope.pick(lambda v: 1 <= v.rank <= 4 and 0 not in v.shape)
    if value is None:
        return None
    for _ in range(scope.draw.integer(2, 4)):
        if 1 <= value.rank <= 5 and scope.apply(shapes.view_of(scope, value)):
            value = scope.last
    form = scope.draw.integer(0, 4)
    if form == 0 and value.dtype.is_floating_point and scope.is_writable(value):
        scope.several(scope.draw.choose([f"{value}.mul_(0.5)", f"{value}.add_(1)", f"{value}.zero_()"]), ARITHMETIC, 0)
        return None
    return Step(f"{value}.contiguous()", MOVE) if form == 1 else None
