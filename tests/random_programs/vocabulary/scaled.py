"""Quantized layers with the scales of real models: any number from tiny to large, chosen ahead for the values at hand or found at run time, and
zero points off zero. Integers reach the ends of their ranges.

What is quantized is rarely exact here (see `scope`): integers are compared bit by bit where no tie is near.
"""

from __future__ import annotations

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, QUANTISE, REDUCTION, SMOOTH, SUM
from tests.random_programs.scope import Scope, Value

# Of the range of 8 bits that values fill: some saturate, some take a few integers alone.
_FILLED = (0.1, 0.5, 0.8, 1.0, 1.0, 1.3, 4.0)
_MAGNITUDES = (2.0**-14, 2.0**-6, 1.0, 1.0, 1.0, 2.0**4)


def _between(scope: Scope, low: float, high: float) -> float:
    """A number of which no float32 is a power of two, mostly."""
    return low + (high - low) * scope.draw.integer(0, 10**4) / 10**4


def _scale(scope: Scope, magnitude: float) -> float:
    """A scale for values of that magnitude, with as many digits as a float32 has."""
    wanted = magnitude / (127 * scope.draw.choose(_FILLED)) * _between(scope, 0.7, 1.4)
    return float(torch.tensor(wanted, dtype=torch.float32))


def _floats(scope: Scope, *ranks: int) -> Value | None:
    return scope.pick(lambda v: v.dtype is torch.float32 and 0 not in v.shape and (not ranks or v.rank in ranks))


def _given(scope: Scope, rank: int) -> Value:
    """A value of that rank, or a new one, of any magnitude."""
    found = _floats(scope, rank)
    if found is not None and not scope.draw.chance(3):
        return found
    sizes = [size for size in scope.sizes if size]
    shape = [min(scope.draw.choose(sizes), 9 if rank > 2 else 64) for _ in range(rank)]
    return scope.fresh(shape, torch.float32, scale=scope.draw.choose(_MAGNITUDES))


def _zero(scope: Scope, low: int, high: int) -> int:
    return scope.draw.choose([0, 0, (low + high + 1) // 2, low, high, scope.draw.integer(low, high)])


def _bounds(scope: Scope) -> tuple[int, int, torch.dtype]:
    return scope.draw.choose(
        [(-128, 127, torch.int8), (-127, 127, torch.int8), (0, 255, torch.uint8), (0, 127, torch.uint8)]
    )


def rounded(scope: Scope, x: Value) -> Value:
    """A value quantized and dequantized, by numbers in the program or found at run time: for all of it, by channel or by row."""
    draw = scope.draw
    low, high, dtype = _bounds(scope)
    match draw.integer(0, 8):
        case 0 | 1:
            text = f"{_scale(scope, scope.magnitude(x))}, {_zero(scope, low, high)}, {low}, {high}, {dtype}"
            q = scope.let(f"quantize({x}, {text})", QUANTISE)
            return scope.let(f"dequantize({q}, {text})", ARITHMETIC)
        case 2 if x.rank:
            axis = draw.integer(0, x.rank - 1)
            scales = [_scale(scope, scope.magnitude(x)) for _ in range(x.shape[axis])]
            text = f"{scales}, {[_zero(scope, low, high) for _ in scales]}, {axis}, {low}, {high}, {dtype}"
            q = scope.let(f"quantize_channels({x}, {text})", QUANTISE)
            return scope.let(f"dequantize_channels({q}, {text})", ARITHMETIC)
        case 3 if x.rank == 2:
            scales = [_scale(scope, scope.magnitude(x)) for _ in range(x.shape[0])]
            text = f"{scales}, {[_zero(scope, low, high) for _ in scales]}, {low}, {high}, {dtype}"
            q = scope.let(f"quantize_rows({x}, {text})", QUANTISE)
            return scope.let(f"dequantize_rows({q}, {text})", ARITHMETIC)
        case 4 if x.rank == 2 and x.shape[1] % 4 == 0:
            text = f"{low}, {high}, {dtype}, {x.shape[1] // 2}"
            scales, zeros = (
                [[number() for _ in range(2)] for _ in range(x.shape[0])]
                for number in (lambda: _scale(scope, scope.magnitude(x)), lambda: _zero(scope, low, high))
            )
            q = scope.let(f"quantize_groups({x}, {scales}, {zeros}, {text})", QUANTISE)
            return scope.let(f"dequantize_groups({q}, {scales}, {zeros}, {text})", ARITHMETIC)
        case 5:
            scale, zero = _scale(scope, scope.magnitude(x)), _zero(scope, low, high)
            q = scope.let(f"quantize_plainly({x}, {scale}, {zero}, {low}, {high}, {dtype})", QUANTISE)
            return _plainly(scope, q, str(zero), str(scale))
        case 6 if x.rank:
            how = f'"{draw.choose(["rows", "affine rows", "affine rows"])}", -128, 127, torch.int8'
        case _:
            how = f'"{draw.choose(["affine", "affine", "symmetric"])}", {low}, {high}, {dtype}'
    q = scope.let(f"quantize_now({x}, {how})", QUANTISE)
    return scope.let(f"dequantize_now({q}, {x}, {how})", ARITHMETIC)


def _plainly(scope: Scope, q: Value, zero: str, scale: str) -> Value:
    """Dequantized as models write it out; the zero point is taken off as integers or as floats."""
    texts = [f"({q}.to(float32) - {zero}) * {scale}", f"({q}.to(torch.int32) - {zero}).to(float32) * {scale}"]
    return scope.let(scope.draw.choose(texts), ARITHMETIC)


def pair(scope: Scope) -> None:
    """A value quantized and dequantized."""
    rounded(scope, _given(scope, scope.draw.choose([1, 2, 3, 4])))


def _moved(scope: Scope, x: Value) -> Value:
    """Put between quantized values what stands there in models: activations, sums, concatenations, views, poolings."""
    texts = [
        f"torch.relu({x})",
        f"F.relu6({x})",
        f"F.hardtanh({x}, -0.7, 1.3)",
        f"torch.cat(({x}, {x}), dim=-1)",
        f"{x}.transpose(0, -1)",
        f"{x}.flatten()",
        f"{x}.unsqueeze(1)",
        f"{x}[..., ::2]",
    ]
    if x.rank == 4:
        texts.append(f"F.max_pool2d({x}, 3, stride=2, padding=1, ceil_mode=True)")
        texts.append(f"F.max_pool2d({x}, 2, stride=1, padding=1)")
    return scope.let(scope.draw.choose(texts), MOVE)


def _added(scope: Scope, x: Value) -> Value:
    """A residual sum: both of its operands are quantized."""
    magnitude = scope.magnitude(x)
    power = 2.0 ** (torch.tensor(magnitude).log2().floor().item() - 1)
    other = rounded(scope, scope.fresh(x.shape, torch.float32, scale=power))
    return scope.let(f"{x} + {other}", ARITHMETIC)


def _followed(scope: Scope, y: Value) -> None:
    """Put behind a layer what follows it, and requantization: each may be missing."""
    draw = scope.draw
    if draw.chance(2):
        y = _added(scope, y) if draw.chance(3) else _moved(scope, y)
    if not draw.chance(3):
        rounded(scope, y)


def pairs(scope: Scope) -> None:
    """A value quantized twice, with what moves, bounds or adds in between."""
    _followed(scope, rounded(scope, _given(scope, scope.draw.choose([2, 3, 4]))))


def _weight(scope: Scope, shape: list[int], axis: int, depth: int) -> Value:
    """Integers of a constant, or of an input, dequantized by channel or as one. Of `depth` products results keep within bounds."""
    draw = scope.draw
    w = scope.fresh(shape, torch.int8, weight=not draw.chance(3), full=True)
    low, high = draw.choose([(-128, 127), (-127, 127), (-64, 63)])
    if low == -64:  # as processors without VNNI have them
        w = scope.let(f"{w}.clamp(-64, 63)", MOVE)
    if draw.chance(4):  # by numbers that are inputs or constants themselves
        narrow = tuple(shape[axis] if d == axis else 1 for d in range(len(shape)))
        scales = scope.fresh(narrow, torch.float32, weight=draw.chance(2), scale=draw.choose([2.0**-9, 2.0**-11]))
        zeros = scope.fresh(narrow, torch.int8, weight=True) if draw.chance(3) else 0
        return _plainly(scope, w, str(zeros), str(scales))
    magnitude = draw.choose([1e-3, 0.3, 2.0, 8.0]) / depth
    if draw.chance(4):
        return scope.let(f"dequantize({w}, {_scale(scope, magnitude)}, 0, {low}, {high}, torch.int8)", ARITHMETIC)
    scales = [_scale(scope, magnitude) for _ in range(shape[axis])]
    zeros = draw.choose([None, [0] * len(scales), [_zero(scope, low, high) for _ in scales]])
    return scope.let(f"dequantize_channels({w}, {scales}, {zeros}, {axis}, {low}, {high}, torch.int8)", ARITHMETIC)


def linear(scope: Scope) -> None:
    """A linear layer of quantized operands; its weight as (n, k) or as (k, n)."""
    draw = scope.draw
    x = rounded(scope, _given(scope, draw.choose([2, 2, 3])))
    n, k = draw.choose([size for size in scope.sizes if size]), x.shape[-1]
    bias = scope.fresh([n], torch.float32, weight=True, scale=draw.choose(_MAGNITUDES)) if draw.chance(2) else None
    if draw.chance(3):
        text = f"torch.matmul({x}, {_weight(scope, [k, n], 1, k)})" + (f" + {bias}" if bias else "")
    else:
        text = f"F.linear({x}, {_weight(scope, [n, k], 0, k)}" + (f", {bias})" if bias else ")")
    _followed(scope, scope.let(text, SUM))


def products(scope: Scope) -> None:
    """A product of two values that are quantized, as attention has them."""
    draw = scope.draw
    x = rounded(scope, _given(scope, 3))
    batch, rows, k = x.shape
    shape = [batch, draw.choose([1, 4, 9]), k]
    y = rounded(scope, scope.fresh(shape, torch.float32, scale=draw.choose(_MAGNITUDES)))
    _followed(scope, scope.let(f"torch.bmm({x}, {y}.transpose(1, 2)) / {float(k * rows)}", SUM))


def plain_product(scope: Scope) -> None:
    """A product of integers as graphs of torchao have it: `_int_mm`, and scales of rows and of columns behind it."""
    draw = scope.draw
    x = _given(scope, 2)
    q = scope.let(f"quantize_row_wise({x})", QUANTISE)
    k, n = x.shape[1], draw.choose([size for size in scope.sizes if size])
    w = scope.fresh([k, n], torch.int8, weight=not draw.chance(3), full=True)
    sums = scope.let(f"torch._int_mm({q}, {w})", MOVE)
    scales = scope.fresh([n], torch.float32, weight=True, scale=2.0**-10)
    y = scope.let(f"{sums} * row_scales({x}) * {scales}", ARITHMETIC)
    _followed(scope, y)


def convolution(scope: Scope) -> None:
    """A convolution of quantized operands, with padding, strides, dilation, groups or a window of its own for each channel."""
    draw = scope.draw
    x = rounded(scope, _given(scope, draw.choose([3, 4, 4, 4])))
    inputs, spatial = x.shape[1], x.rank - 2
    groups = draw.choose([1, 1, inputs, *(g for g in (2, 4) if inputs % g == 0)])
    outputs = groups * draw.choose([1, 2, 4] if groups > 1 else [1, 3, 8, 16, 33])
    window = [draw.choose([1, 3, 3, 5]) for _ in range(spatial)]
    depth = inputs // groups * torch.Size(window).numel()
    w = _weight(scope, [outputs, inputs // groups, *window], 0, depth)
    bias = scope.fresh([outputs], torch.float32, weight=True) if draw.chance(2) else None
    # In groups PyTorch's own dilated convolutions may crash: 3 groups of one channel of 8 by 1, windows of 5 by 1, strides of 2 (2.13).
    dilation = draw.choose([1, 1, 2]) if groups == 1 else 1
    how = f"stride={draw.choose([1, 1, 2])}, padding={draw.choose([0, 1, 2])}, dilation={dilation}"
    _followed(scope, scope.let(f"F.conv{spatial}d({x}, {w}, {bias}, {how}, groups={groups})", SUM))


def transposed_convolution(scope: Scope) -> None:
    """A transposed convolution of quantized operands."""
    draw = scope.draw
    x = rounded(scope, _given(scope, 4))
    groups = draw.choose([1, 1, x.shape[1]])
    outputs, window, stride = draw.choose([1, 2, 8]), draw.choose([1, 2, 3, 4]), draw.choose([1, 2, 2])
    w = _weight(scope, [x.shape[1], outputs, window, window], 1, x.shape[1] // groups * window)
    padding = draw.choose([0, 1] if window > 1 else [0])
    text = f"F.conv_transpose2d({x}, {w}, None, stride={stride}, padding={padding}, groups={groups})"
    _followed(scope, scope.let(text, SUM))


def siblings(scope: Scope) -> None:
    """Two layers that read one quantized value, by scales of their own; added up, concatenated, or each by itself."""
    draw = scope.draw
    x = rounded(scope, _given(scope, draw.choose([2, 3])))
    n, k = draw.choose([8, 16, 17]), x.shape[-1]
    one, other = (scope.let(f"F.linear({x}, {_weight(scope, [n, k], 0, k)})", SUM) for _ in range(2))
    text = draw.choose([f"{one} + {other}", f"torch.cat(({one}, {other}), -1)", ""])
    for y in [scope.let(text, ARITHMETIC)] if text else [one, other]:
        _followed(scope, y)


def attention(scope: Scope) -> None:
    """Attention whose queries, keys, values and weights are quantized; (batch, length, channels)."""
    draw = scope.draw
    x = _given(scope, 3)
    batch, k = x.shape[0], x.shape[2]
    keys, values = (scope.fresh([batch, draw.choose([4, 9, 16]), k], torch.float32) for _ in range(2))
    if keys.shape[1] != values.shape[1]:
        values = keys
    q, keys, values = (rounded(scope, each) for each in (x, keys, values))
    scores = scope.let(f"torch.bmm({q}, {keys}.transpose(1, 2)) / {float(k)}", SUM)
    weights = rounded(scope, scope.let(f"torch.softmax({scores}, -1)", SMOOTH))
    _followed(scope, scope.let(f"torch.bmm({weights}, {values})", SUM))


def weight_alone(scope: Scope) -> None:
    """A linear layer of which the weight alone is quantized, in groups."""
    draw = scope.draw
    size = draw.choose([8, 32])
    k, n = size * draw.choose([1, 2, 3]), draw.choose([1, 8, 17, 32])
    x = scope.fresh([draw.choose([1, 2, 5, 16]), k], torch.float32)
    w = scope.fresh([n, k], torch.int8, weight=True, full=True)
    low, high = draw.choose([(-8, 7), (-128, 127)])  # weights of 4 bits, or of 8
    w = scope.let(f"{w}.clamp({low}, {high})", MOVE)
    scales = [[_scale(scope, 1.0 / k) for _ in range(k // size)] for _ in range(n)]
    zeros = [[_zero(scope, low, high) for _ in row] for row in scales] if draw.chance(2) else None
    wide = scope.let(f"dequantize_groups({w}, {scales}, {zeros}, {low}, {high}, torch.int8, {size})", ARITHMETIC)
    scope.let(f"F.linear({x}, {wide})", REDUCTION)  # rows may be multiplied in parts


TEMPLATES = (
    (pair, 2),
    (pairs, 5),
    (linear, 5),
    (products, 2),
    (plain_product, 2),
    (siblings, 1),
    (attention, 1),
    (convolution, 5),
    (transposed_convolution, 1),
    (weight_alone, 1),
)
