"""Matrix products, convolutions, pooling, resampling, attention; weights are new inputs or values there are."""

from __future__ import annotations

import torch

from tests.random_programs.noise import MOVE, REDUCTION
from tests.random_programs.scope import Scope, Step, Value


def _float(scope: Scope, rank: int, most: int = 0) -> Value | None:
    return scope.pick(lambda v: v.dtype.is_floating_point and rank <= v.rank <= (most or rank))


def _weight(scope: Scope, shape: list[int], like: Value) -> Value:
    return scope.fresh(shape, like.dtype, weight=scope.draw.chance(2))


def linear(scope: Scope) -> Step | None:
    a = _float(scope, 1, 4)
    if a is None:
        return None
    n, k = scope.draw.choose(scope.sizes), a.shape[-1]
    weight = (
        scope.pick(lambda v: v.dtype == a.dtype and v.rank == 2 and v.shape[1] == k) if scope.draw.chance(4) else None
    )
    weight = weight or _weight(scope, [n, k], a)
    bias = f", {_weight(scope, [weight.shape[0]], a)}" if scope.draw.chance(2) else ""
    after = scope.draw.choose(["{}", "{}", "F.relu({})", "torch.sigmoid({})", "F.gelu({})", "{} * 0.25"])
    return Step(after.format(f"F.linear({a}, {weight}{bias})"), REDUCTION)


def product(scope: Scope) -> Step | None:
    """mm, bmm, matmul, einsum and their kin."""
    a = _float(scope, 1, 4)
    if a is None:
        return None
    draw, k, n = scope.draw, a.shape[-1], scope.draw.choose(scope.sizes)
    other = scope.pick(lambda v: v.dtype == a.dtype and 1 <= v.rank <= 4 and v.shape[-min(v.rank, 2)] == k)
    if other is not None and draw.chance(2):
        return Step(f"torch.matmul({a}, {other})", REDUCTION)
    if a.rank == 1:
        return Step(f"torch.dot({a}, {_weight(scope, [k], a)})", REDUCTION)
    if a.rank == 2:
        b = _weight(scope, [k, n], a)
        texts = [
            f"torch.mm({a}, {b})",
            f"{a} @ {b}",
            f"torch.addmm({_weight(scope, [n], a)}, {a}, {b}, beta=0.5, alpha=2)",
            f"torch.mv({a}, {b}[:, 0])",
            f"torch.mm({a}.t(), {a})",
            f"torch.mm({a}, {a}.t())",
            f"torch.einsum('ik,kj->ji', {a}, {b})",
            f"torch.outer({a}[0], {b}[0])",
            f"torch.einsum('ik,jk->ij', {a}, {a})",
        ]
        return Step(draw.choose(texts), REDUCTION)
    if a.rank == 3:
        batch, rows = a.shape[0], a.shape[1]
        b = _weight(scope, [batch, k, n], a)
        texts = [
            f"torch.bmm({a}, {b})",
            f"{a} @ {b}",
            f"torch.baddbmm({_weight(scope, [batch, rows, n], a)}, {a}, {b}, beta=0.5)",
            f"torch.einsum('bik,bkj->bji', {a}, {b})",
            f"torch.bmm({a}, {a}.mT)",
            f"torch.matmul({a}, {b}[0])",
            f"torch.addbmm({_weight(scope, [rows, n], a)}, {a}, {b})",
        ]
        return Step(draw.choose(texts), REDUCTION)
    return Step(draw.choose([f"{a} @ {a}.mT", f"torch.einsum('abij,abkj->abik', {a}, {a})"]), REDUCTION)


def _image(scope: Scope, spatial: int) -> Value:
    """A value that is a batch of images, or a new one."""
    found = scope.pick(lambda v: v.dtype.is_floating_point and v.rank == spatial + 2 and 0 not in v.shape)
    if found is not None and not scope.draw.chance(4):
        return found
    sizes = [n for n in scope.sizes if n] or [3]
    small = [min(scope.draw.choose(sizes), 9) for _ in range(spatial)]
    shape = [scope.draw.integer(1, 3), min(scope.draw.choose(sizes), 18), *small]
    return scope.fresh(shape, scope.draw.choose(scope.dtypes))


def convolution(scope: Scope) -> Step | None:
    draw = scope.draw
    spatial = draw.choose([2, 2, 2, 2, 1, 3])
    a = _image(scope, spatial)
    channels = a.shape[1]
    groups = draw.choose([1, 1, 1, channels, *[n for n in range(1, channels + 1) if channels % n == 0]])
    outputs = groups * draw.choose([1, 1, 2, 3, max(1, 16 // groups)])
    kernel = [draw.choose([1, 1, 2, 3, 3, 5]) for _ in range(spatial)]
    bias = f"{_weight(scope, [outputs], a)}" if draw.chance(2) else "None"
    if draw.chance(8):
        weight = _weight(scope, [channels, max(1, outputs // groups), *kernel], a)
        return Step(
            f"F.conv_transpose{spatial}d({a}, {weight}, None, {draw.integer(1, 2)}, groups={groups})", REDUCTION
        )
    weight = _weight(scope, [outputs, channels // groups, *kernel], a)
    padding = draw.choose([0, 0, 1, 1, 2, "'same'"])
    stride = 1 if padding == "'same'" else draw.choose([1, 1, 2, 3])
    text = f"F.conv{spatial}d({a}, {weight}, {bias}, {stride}, {padding}, {draw.choose([1, 1, 1, 2])}, {groups})"
    after = draw.choose(["{}", "{}", "F.relu({})", "F.silu({})", "{}.clamp(0, 6)", "{} + 1"])
    return Step(after.format(text), REDUCTION)


def pooling(scope: Scope) -> Step | None:
    draw = scope.draw
    spatial = draw.choose([2, 2, 2, 1, 3])
    a = _image(scope, spatial)
    k, s = draw.integer(1, 3), draw.integer(1, 3)
    size = [draw.integer(1, 4) for _ in range(spatial)]
    padding = draw.integer(0, k // 2)
    if draw.chance(2):
        ceiling = draw.chance(3)
        texts = [
            f"F.max_pool{spatial}d({a}, {k}, {s}, {padding}, ceil_mode={ceiling})",
            f"F.adaptive_max_pool{spatial}d({a}, {size})",
        ]
        if spatial == 2:
            texts += [f"F.max_pool2d({a}, {k}, {s}, {padding}, {draw.integer(1, 2)})"]
        return Step(draw.choose(texts), MOVE)
    counted = f"count_include_pad={draw.chance(2)}, ceil_mode={draw.chance(3)}"
    texts = [
        f"F.avg_pool{spatial}d({a}, {k}, {s}, {padding}, {counted})".replace("ceil_mode", "ceil_mode"),
        f"F.adaptive_avg_pool{spatial}d({a}, {size})",
    ]
    return Step(draw.choose(texts), REDUCTION)


def resampling(scope: Scope) -> Step | None:
    draw = scope.draw
    a = _image(scope, 2)
    size = [draw.integer(1, 9), draw.integer(1, 9)]
    texts = [
        (f"F.interpolate({a}, {size}, mode='nearest')", MOVE),
        (f"F.interpolate({a}, scale_factor=2, mode='nearest')", MOVE),
        (f"F.interpolate({a}, {size}, mode='nearest-exact')", MOVE),
        (f"F.interpolate({a}, {size}, mode='bilinear', align_corners={draw.chance(2)})", REDUCTION),
        (f"F.interpolate({a}, scale_factor=2, mode='bilinear', align_corners=False)", REDUCTION),
        (f"F.interpolate({a}, {size}, mode='bicubic', align_corners=False)", REDUCTION),
        (f"F.unfold({a}, 2, stride={draw.integer(1, 2)}, padding=1)", MOVE),
    ]
    return Step(*draw.choose(texts))


def attention(scope: Scope) -> Step | None:
    draw = scope.draw
    dtype = draw.choose([d for d in scope.dtypes if d is not torch.float16] or [torch.float32])
    found = scope.pick(lambda v: v.rank == 4 and v.dtype.is_floating_point and 0 not in v.shape)
    q = found or scope.fresh(
        [draw.integer(1, 2), draw.integer(1, 3), draw.choose(scope.sizes), draw.choose([4, 8, 16])], dtype
    )
    keys = draw.choose([n for n in scope.sizes if n] or [3])
    k = scope.fresh([*q.shape[:2], keys, q.shape[3]], q.dtype)
    v = scope.fresh([*q.shape[:2], keys, q.shape[3]], q.dtype)
    form = draw.integer(0, 3)
    if form == 0:
        return Step(f"F.scaled_dot_product_attention({q}, {k}, {v})", REDUCTION)
    if form == 1:
        return Step(f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True)", REDUCTION)
    if form == 2:
        mask = scope.fresh([q.shape[2], keys], q.dtype)
        return Step(f"F.scaled_dot_product_attention({q}, {k}, {v}, {mask}, scale=0.25)", REDUCTION)
    return Step(f"torch.softmax({q} @ {k}.mT * 0.3, -1) @ {v}", REDUCTION)


TEMPLATES = ((linear, 4), (product, 4), (convolution, 5), (pooling, 3), (resampling, 1), (attention, 1))
