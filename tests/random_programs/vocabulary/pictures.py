"""Idioms of networks for pictures, as libraries of classifiers, detectors and diffusion models write them."""

from __future__ import annotations

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, REDUCTION, SMOOTH
from tests.random_programs.scope import Scope, Value
from tests.random_programs.vocabulary.parts import (
    activation,
    channel_norm,
    divisor,
    last_norm,
    linear,
    residual,
    weight,
)

_LAYOUTS = ("contiguous", "channels_last", "channels_last", "sliced", "sliced_last", "transposed", "offset")


def picture(scope: Scope) -> Value:
    """A batch of pictures (batch, channels, height, width): one there is, or a new one; sides and batch are often 1."""
    draw = scope.draw
    found = scope.pick(
        lambda v: (
            v.dtype.is_floating_point and v.rank == 4 and 0 not in v.shape and v.shape[1] <= 32 and v.shape[0] <= 4
        )
    )
    if found is not None and not draw.chance(5):
        return found
    shape = [
        draw.choose([1, 1, 2, 3]),
        draw.choose([1, 2, 3, 4, 6, 8, 16]),
        *(draw.choose([1, 3, 4, 6, 7, 8]) for _ in range(2)),
    ]
    return scope.fresh(shape, draw.choose(scope.dtypes), layout=draw.choose(_LAYOUTS))


def conv(
    scope: Scope, x: Value, outputs: int, kernel: int, stride: int = 1, groups: int = 1, padding: int | None = None
) -> Value:
    inputs = x.shape[1] // groups
    filters = weight(scope, [outputs, inputs, kernel, kernel], x.dtype, inputs * kernel * kernel)
    bias = f"{weight(scope, [outputs], x.dtype)}" if scope.draw.chance(2) else "None"
    margin = kernel // 2 if padding is None else padding
    return scope.let(f"F.conv2d({x}, {filters}, {bias}, {stride}, {margin}, 1, {groups})", REDUCTION)


def _width(scope: Scope) -> int:
    return scope.draw.choose([1, 2, 4, 6, 8, 16])


def conv_block(scope: Scope) -> None:
    """Convolution, norm, activation, and what they started from added."""
    x = picture(scope)
    outputs = x.shape[1] if scope.draw.chance(2) else _width(scope)
    groups = x.shape[1] if outputs == x.shape[1] and scope.draw.chance(3) else 1
    y = conv(scope, x, outputs, scope.draw.choose([1, 3, 3, 5]), scope.draw.choose([1, 1, 2]), groups)
    y = channel_norm(scope, y)
    if scope.draw.chance(2):
        y = activation(scope, y)
    y = residual(scope, x, y)
    if scope.draw.chance(2):
        activation(scope, y)


def diffusion_block(scope: Scope) -> None:
    """Norm, SiLU and convolution twice, an embedding of the time between them, a shortcut around them."""
    x = picture(scope)
    outputs = _width(scope)
    y = scope.let(f"F.silu({channel_norm(scope, x)})", SMOOTH)
    y = conv(scope, y, outputs, 3)
    steps = scope.fresh([x.shape[0], 4], x.dtype, layout="contiguous")
    time = linear(scope, scope.let(f"F.silu({steps})", SMOOTH), outputs * 2)
    if scope.draw.chance(2):
        scale, shift = scope.several(f"{time}[:, :, None, None].chunk(2, dim=1)", MOVE, 2)
        y = scope.let(f"{channel_norm(scope, y)} * (1 + {scale}) + {shift}", ARITHMETIC)
    else:
        y = channel_norm(scope, scope.let(f"{y} + {time}[:, :{outputs}, None, None]", ARITHMETIC))
    y = conv(scope, scope.let(f"F.silu({y})", SMOOTH), outputs, 3)
    short = x if x.shape[1] == outputs else conv(scope, x, outputs, 1)
    scope.let(f"({short} + {y}) / 1.0", ARITHMETIC)


def picture_attention(scope: Scope) -> None:
    """Every pixel a token, as in the middle of an autoencoder."""
    x = picture(scope)
    batch, channels, height, width = x.shape
    y = channel_norm(scope, x)
    flat = scope.draw.choose([f"{y}.view({batch}, {channels}, -1).transpose(1, 2)", f"{y}.flatten(2).transpose(1, 2)"])
    y = scope.let(
        flat if scope.draw.chance(2) else f"{y}.permute(0, 2, 3, 1).reshape({batch}, {height * width}, {channels})",
        MOVE,
    )
    heads = divisor(scope, channels)
    split = f".view({batch}, -1, {heads}, {channels // heads}).transpose(1, 2)"
    query, key, value = (scope.let(f"{linear(scope, y, channels)}{split}", MOVE) for _ in range(3))
    y = scope.let(f"F.scaled_dot_product_attention({query}, {key}, {value})", REDUCTION)
    y = linear(scope, scope.let(f"{y}.transpose(1, 2).reshape({batch}, -1, {channels})", MOVE), channels)
    y = scope.let(f"{y}.transpose(-1, -2).reshape({batch}, {channels}, {height}, {width})", MOVE)
    residual(scope, x, y)


def squeeze_excite(scope: Scope) -> None:
    x = picture(scope)
    channels = x.shape[1]
    pooled = scope.draw.choose([f"{x}.mean((2, 3), keepdim=True)", f"F.adaptive_avg_pool2d({x}, 1)"])
    y = activation(scope, conv(scope, scope.let(pooled, REDUCTION), max(1, channels // 2), 1))
    gate = scope.draw.choose(["torch.sigmoid({})", "F.hardsigmoid({})"]).format(conv(scope, y, channels, 1))
    scope.let(f"{x} * {scope.let(gate, SMOOTH)}", ARITHMETIC)


def efficient_channel_attention(scope: Scope) -> None:
    """A convolution over the channels' means."""
    x = picture(scope)
    y = scope.let(f"{x}.mean((2, 3)).view({x.shape[0]}, 1, -1)", REDUCTION)
    y = scope.let(f"F.conv1d({y}, {weight(scope, [1, 1, 3], x.dtype, 3)}, None, padding=1)", REDUCTION)
    gate = scope.let(f"{y}.sigmoid().view({x.shape[0]}, -1, 1, 1)", SMOOTH)
    scope.let(f"{x} * {gate}.expand_as({x})", ARITHMETIC)


def cross_stage(scope: Scope) -> None:
    """A detector's block: half of the channels goes through convolutions, and all that was made is joined."""
    x = picture(scope)
    half = scope.draw.choose([1, 2, 4])
    y = activation(scope, channel_norm(scope, conv(scope, x, 2 * half, 1)))
    first, second = scope.several(
        f"{y}.chunk(2, 1)" if scope.draw.chance(2) else f"{y}.split(({half}, {half}), 1)", MOVE, 2
    )
    third = activation(scope, channel_norm(scope, conv(scope, second, half, 3)))
    third = residual(scope, second, third)
    conv(scope, scope.let(f"torch.cat(({first}, {second}, {third}), 1)", MOVE), _width(scope), 1)


def pyramid_pooling(scope: Scope) -> None:
    """The same max pooling over and over, all results joined."""
    x = picture(scope)
    a = scope.let(f"F.max_pool2d({x}, 3, 1, 1)", MOVE)
    b = scope.let(f"F.max_pool2d({a}, 3, 1, 1)", MOVE)
    conv(scope, scope.let(f"torch.cat(({x}, {a}, {b}), 1)", MOVE), _width(scope), 1)


def up_and_join(scope: Scope) -> None:
    """Twice the size, joined with a picture of that size."""
    x = picture(scope)
    batch, channels, height, width = x.shape
    how = scope.draw.choose(
        ["mode='nearest'", "mode='bilinear', align_corners=False", "mode='bilinear', align_corners=True"]
    )
    if scope.draw.chance(3):
        filters = weight(scope, [channels, channels, 2, 2], x.dtype, channels)
        up = scope.let(f"F.conv_transpose2d({x}, {filters}, None, 2)", REDUCTION)
    else:
        size = scope.draw.choose(["scale_factor=2", "scale_factor=2.0", f"size=({2 * height}, {2 * width})"])
        up = scope.let(f"F.interpolate({x}, {size}, {how})", MOVE if "nearest" in how else REDUCTION)
    skip = scope.fresh([batch, scope.draw.integer(1, 4), 2 * height, 2 * width], x.dtype)
    conv(scope, scope.let(f"torch.cat(({up}, {skip}), 1)", MOVE), _width(scope), 3)


def boxes(scope: Scope) -> None:
    """Distances as expectations over bins, and boxes around the anchors' centres."""
    x = picture(scope)
    batch, _, height, width = x.shape
    bins = scope.draw.choose([2, 4])
    y = scope.let(f"{conv(scope, x, 4 * bins, 1)}.view({batch}, 4, {bins}, {height * width})", MOVE)
    y = scope.let(f"{y}.transpose(2, 1).softmax(1)", REDUCTION)
    distance = scope.let(f"({y} * torch.arange({bins}, dtype=float32).view(1, {bins}, 1, 1)).sum(1)", REDUCTION)
    left, right = scope.several(f"{distance}.chunk(2, 1)", MOVE, 2)
    grid = scope.several(
        f"torch.meshgrid(torch.arange({height}) + 0.5, torch.arange({width}) + 0.5, indexing='ij')", MOVE, 2
    )
    centres = scope.let(f"torch.stack(({grid[1]}, {grid[0]}), -1).view(-1, 2).T[None]", MOVE)
    low, high = scope.let(f"{centres} - {left}", ARITHMETIC), scope.let(f"{centres} + {right}", ARITHMETIC)
    scope.let(f"torch.cat((({low} + {high}) / 2, {high} - {low}), 1) * 8", ARITHMETIC)


def next_block(scope: Scope) -> None:
    """A convolution by channel, and the layers of a transformer with the channels last."""
    x = picture(scope)
    channels = x.shape[1]
    y = conv(scope, x, channels, scope.draw.choose([3, 5]), 1, channels)
    y = last_norm(scope, scope.let(f"{y}.permute(0, 2, 3, 1)", MOVE))
    y = activation(scope, linear(scope, y, 2 * channels))
    if scope.draw.chance(3):  # the response of a channel beside the others'
        size = scope.let(f"torch.linalg.vector_norm({y}, dim=(1, 2), keepdim=True)", REDUCTION)
        y = scope.let(f"{y} + {y} * ({size} / ({size}.mean(-1, keepdim=True) + 1e-2))", REDUCTION)
    y = linear(scope, y, channels)
    y = scope.let(f"({y} * {weight(scope, [channels], x.dtype)}).permute(0, 3, 1, 2)", ARITHMETIC)
    residual(scope, x, y)


def patches(scope: Scope) -> None:
    """A picture as tokens, a learned one before them, positions added."""
    x = picture(scope)
    width = scope.draw.choose([4, 8])
    side = min(2, *x.shape[2:])
    y = conv(scope, x, width, side, side, 1, 0)
    y = scope.let(f"{y}.flatten(2).transpose(1, 2)", MOVE)
    first = weight(scope, [1, 1, width], x.dtype)
    y = scope.let(f"torch.cat(({first}.expand({x.shape[0]}, -1, -1), {y}), dim=1)", MOVE)
    y = scope.let(f"{y} + {weight(scope, [1, y.shape[1], width], x.dtype)}", ARITHMETIC)
    if scope.draw.chance(2):
        scope.let(f"{last_norm(scope, y)}[:, 0]", MOVE)


def windows(scope: Scope) -> None:
    """Windows of a shifted picture, and back."""
    x = picture(scope)
    batch, channels, height, width = x.shape
    rows, columns = divisor(scope, height), divisor(scope, width)
    y = scope.let(f"torch.roll({x}.permute(0, 2, 3, 1), shifts=(-1, -1), dims=(1, 2))", MOVE)
    y = scope.let(f"{y}.view({batch}, {height // rows}, {rows}, {width // columns}, {columns}, {channels})", MOVE)
    y = scope.let(f"{y}.permute(0, 1, 3, 2, 4, 5).reshape(-1, {rows * columns}, {channels})", MOVE)
    y = last_norm(scope, y)
    scores = scope.let(f"torch.softmax({y} @ {y}.transpose(-2, -1) * 0.25, -1)", REDUCTION)
    y = scope.let(f"{scores} @ {y}", REDUCTION)
    y = scope.let(f"{y}.view(-1, {height // rows}, {width // columns}, {rows}, {columns}, {channels})", MOVE)
    y = scope.let(f"{y}.permute(0, 1, 3, 2, 4, 5).contiguous().view({batch}, {height}, {width}, {channels})", MOVE)
    scope.let(f"torch.roll({y}, (1, 1), (1, 2)).permute(0, 3, 1, 2)", MOVE)


def rearranged(scope: Scope) -> None:
    """Padding, pixels and channels moved about."""
    x = picture(scope)
    channels, height, width = x.shape[1:]
    groups = divisor(scope, channels)
    texts = [
        f"F.pad({x}, (0, 1, 0, 1))",
        f"F.pad({x}, (1, 1, 1, 1), mode='reflect')" if min(height, width) > 1 else "",
        f"F.pad({x}, (1, 2, 2, 0), mode='replicate')",
        f"F.pad({x}, (1, 0, 0, 1), mode='circular')",
        f"F.pixel_shuffle({x}, 2)" if channels % 4 == 0 else "",
        f"F.pixel_unshuffle({x}, 2)" if not (height % 2 or width % 2) else "",
        f"{x}.view({x.shape[0]}, {groups}, {channels // groups}, {height}, {width}).transpose(1, 2).flatten(1, 2)",
        f"torch.cat(({x}[..., ::2, ::2], {x}[..., 1::2, ::2]), 1)" if height % 2 == 0 else "",
        f"{x}.unfold(2, {min(2, height)}, 1).unfold(3, {min(2, width)}, 1).amax((-1, -2))",
        f"F.fold(F.unfold({x}, {min(2, height, width)}), ({height}, {width}), {min(2, height, width)})",
    ]
    y = scope.let(scope.draw.choose([text for text in texts if text]), REDUCTION)
    if scope.draw.chance(2):
        conv(scope, y, _width(scope), 3, scope.draw.choose([1, 2]), 1, 0 if min(y.shape[2:]) >= 3 else 1)


def pooled(scope: Scope) -> None:
    """A classifier's end."""
    x = picture(scope)
    texts = [
        f"F.adaptive_avg_pool2d({x}, 1).flatten(1)",
        f"{x}.mean([2, 3])",
        f"(F.adaptive_avg_pool2d({x}, 1) + F.adaptive_max_pool2d({x}, 1)).view({x.shape[0]}, -1)",
        f"torch.flatten(F.avg_pool2d({x}, ({x.shape[2]}, {x.shape[3]})), 1)",
        f"{x}.clamp(min=1e-2).pow(3).mean((-2, -1)).pow(1 / 3)",
    ]
    y = scope.let(scope.draw.choose(texts), REDUCTION)
    y = linear(scope, y, _width(scope))
    if scope.draw.chance(2):
        scope.let(f"{y}.log_softmax(-1)", REDUCTION)


def sampled(scope: Scope) -> None:
    """A picture read at places that a layer computes."""
    x = picture(scope)
    if x.dtype not in (torch.float32, torch.float64):
        return
    places = scope.let(f"torch.tanh({conv(scope, x, 2, 1)}).permute(0, 2, 3, 1)", SMOOTH)
    scope.let(f"F.grid_sample({x}, {places}, align_corners={scope.draw.chance(2)})", REDUCTION)


TEMPLATES = (
    (conv_block, 6),
    (diffusion_block, 4),
    (picture_attention, 3),
    (squeeze_excite, 2),
    (efficient_channel_attention, 1),
    (cross_stage, 2),
    (pyramid_pooling, 1),
    (up_and_join, 2),
    (boxes, 1),
    (next_block, 2),
    (patches, 1),
    (windows, 2),
    (rearranged, 3),
    (pooled, 1),
    (sampled, 1),
)
