"""Quantized layers: values that are rounded to 8 bits and back, alone and in pairs with views and poolings in between, and layers whose
operands are, with what follows them.

Scales are powers of two, so that results stay exact: integers are compared bit by bit, ties of roundings included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, REDUCTION, STEP, SUM
from tests.random_programs.scope import Scope, TakenBackError, Value

_SCALES = (0.0625, 0.125, 0.25, 0.5)


@dataclass(frozen=True)
class _Form:
    """A form of quantized values, as the text of arguments."""

    scale: float
    zero: int
    low: int
    high: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.scale}, {self.zero}, {self.low}, {self.high}, {self.dtype}"


def _form(scope: Scope) -> _Form:
    draw = scope.draw
    scale = draw.choose(_SCALES)
    if draw.chance(2):
        return _Form(scale, draw.choose([0, 0, 3, 128]), 0, draw.choose([255, 255, 127]), torch.uint8)
    return _Form(scale, draw.choose([0, 0, 0, -5, 17]), draw.choose([-128, -127, -128]), 127, torch.int8)


def _exact(scope: Scope, *ranks: int) -> Value | None:
    """A value that may be quantized: of float32, exact, with elements."""
    return scope.pick(
        lambda v: v.dtype is torch.float32 and v.exact and 0 not in v.shape and (not ranks or v.rank in ranks)
    )


def _given(scope: Scope, rank: int) -> Value:
    """Take such a value of that rank, or a new one."""
    found = _exact(scope, rank)
    if found is not None and not scope.draw.chance(4):
        return found
    sizes = [size for size in scope.sizes if size]
    return scope.fresh([min(scope.draw.choose(sizes), 9 if rank > 2 else 33) for _ in range(rank)], torch.float32)


def _rounded(scope: Scope, x: Value, form: _Form) -> Value:
    q = scope.let(f"quantize({x}, {form})", STEP)
    return scope.let(f"dequantize({q}, {form})", ARITHMETIC)


def pair(scope: Scope) -> None:
    """A value is quantized and dequantized."""
    x = _exact(scope)
    if x is None:
        raise TakenBackError
    _rounded(scope, x, _form(scope))


def pairs(scope: Scope) -> None:
    """Twice by the same parameters, or not quite, with what moves or bounds values in between."""
    draw, form = scope.draw, _form(scope)
    x = _rounded(scope, _given(scope, draw.choose([2, 3, 4])), form)
    between = [
        f"{x}.transpose(-1, -2)",
        f"{x}.reshape(-1)",
        f"{x}.unsqueeze(0)",
        f"torch.relu({x})",
        f"F.relu6({x})",
        f"torch.clamp({x}, -1.0, 2.0)",
        f"torch.cat(({x}, {x}), dim=-1)",
        f"{x} * 2",
    ]
    if x.rank == 4:
        between.append(f"F.max_pool2d({x}, 2, stride=1, padding=1, ceil_mode=True)")
    other = _exact(scope, x.rank)
    if other is not None and other.shape[:-1] == x.shape[:-1]:
        between.append(f"torch.cat(({x}, {_rounded(scope, other, form)}), dim=-1)")
    y = scope.let(draw.choose(between), MOVE)
    _rounded(scope, y, form if draw.chance(2) else _form(scope))


def channels(scope: Scope) -> None:
    """A scale and a zero point for each index of a dimension, or of a row."""
    draw = scope.draw
    x = _given(scope, draw.choose([2, 2, 3]))
    axis = draw.integer(0, x.rank - 1)
    scales = [draw.choose(_SCALES) for _ in range(x.shape[axis])]
    zeros = [draw.choose([0, 0, 4, -7]) for _ in range(x.shape[axis])]
    if x.rank == 2 and axis == 0 and draw.chance(2):
        text = f"{scales}, {zeros}, -128, 127, torch.int8"
        q = scope.let(f"quantize_rows({x}, {text})", STEP)
        scope.let(f"dequantize_rows({q}, {text})", ARITHMETIC)
        return
    text = f"{scales}, {zeros}, {axis}, -128, 127, torch.int8"
    q = scope.let(f"quantize_channels({x}, {text})", STEP)
    scope.let(f"dequantize_channels({q}, {text})", ARITHMETIC)


def _weight(scope: Scope, shape: list[int], axis: int = 0) -> Value:
    """A weight of integers, dequantized by output channel."""
    w = scope.fresh(shape, torch.int8, weight=True)
    scales = [scope.draw.choose(_SCALES) for _ in range(shape[axis])]
    return scope.let(f"dequantize_channels({w}, {scales}, None, {axis}, -127, 127, torch.int8)", ARITHMETIC)


def _followed(scope: Scope, y: Value) -> None:
    """An activation, a sum with another quantized value, and requantization: each may be missing."""
    draw = scope.draw
    if draw.chance(2):
        y = scope.let(draw.choose([f"torch.relu({y})", f"F.relu6({y})"]), MOVE)
    if draw.chance(3):
        other = scope.fresh(y.shape, torch.float32)
        y = scope.let(f"{y} + {_rounded(scope, other, _form(scope))}", ARITHMETIC)
        if draw.chance(2):
            y = scope.let(f"torch.relu({y})", MOVE)
    if draw.chance(2) or not y.exact:
        return
    _rounded(scope, y, _form(scope))


def linear(scope: Scope) -> None:
    """A linear layer of quantized operands; its weight by output channel, as (n, k) or as (k, n)."""
    draw = scope.draw
    x = _rounded(scope, _given(scope, draw.choose([2, 2, 3])), _form(scope))
    n, k = draw.choose([size for size in scope.sizes if size]), x.shape[-1]
    bias = scope.fresh([n], torch.float32, weight=True) if draw.chance(2) else None
    if draw.chance(3):
        text = f"torch.matmul({x}, {_weight(scope, [k, n], 1)})" + (f" + {bias}" if bias else "")
    else:
        text = f"F.linear({x}, {_weight(scope, [n, k])}" + (f", {bias})" if bias else ")")
    _followed(scope, scope.let(text, SUM))


def shared(scope: Scope) -> None:
    """A quantized value, read by a quantized layer and by a product of floats."""
    x = _rounded(scope, _given(scope, 2), _form(scope))
    w = _weight(scope, [scope.draw.choose([1, 8, 17]), x.shape[1]])
    scope.let(f"F.linear({x}, {w})", SUM)
    scope.let(scope.draw.choose([f"torch.mm({x}, {x}.t())", f"torch.mm({w}, {x}.t())"]), SUM)


def convolution(scope: Scope) -> None:
    """A convolution of quantized operands, with padding, strides, groups or a window of its own for each channel."""
    draw = scope.draw
    x = _rounded(scope, _given(scope, 4), _form(scope))
    inputs = x.shape[1]
    groups = draw.choose([1, 1, inputs])
    outputs = groups * draw.choose([1, 2] if groups > 1 else [1, 3, 8, 16])
    window = draw.choose([1, 3, 3])
    w = _weight(scope, [outputs, inputs // groups, window, window])
    bias = scope.fresh([outputs], torch.float32, weight=True) if draw.chance(2) else None
    padding = draw.choose([0, 1] if window <= min(x.shape[2:]) else [1])
    text = f"F.conv2d({x}, {w}, {bias}, stride={draw.choose([1, 1, 2])}, padding={padding}, groups={groups})"
    _followed(scope, scope.let(text, SUM))


def weight_alone(scope: Scope) -> None:
    """A linear layer of which the weight alone is quantized, in groups."""
    draw = scope.draw
    size = draw.choose([8, 32])
    k, n = size * draw.choose([1, 2, 3]), draw.choose([1, 8, 17, 32])
    x = scope.fresh([draw.choose([1, 2, 5, 16]), k], torch.float32)
    w = scope.fresh([n, k], torch.int8, weight=True)
    low, high = draw.choose([(-8, 7), (-128, 127)])  # weights of 4 bits, or of 8
    w = scope.let(f"{w}.clamp({low}, {high})", MOVE)
    scales = [[draw.choose(_SCALES) for _ in range(k // size)] for _ in range(n)]
    wide = scope.let(f"dequantize_groups({w}, {scales}, None, {low}, {high}, torch.int8, {size})", ARITHMETIC)
    scope.let(f"F.linear({x}, {wide})", REDUCTION)  # rows may be multiplied in parts


TEMPLATES = ((pair, 2), (pairs, 4), (channels, 2), (linear, 4), (shared, 1), (convolution, 4), (weight_alone, 1))
