"""Sums, extremes, moments, norms, scans, softmaxes and normalisations."""

from __future__ import annotations

import torch

from tests.random_programs.noise import MOVE, REDUCTION, SMOOTH, STEP, SUM
from tests.random_programs.scope import Scope, Step, Value
from tests.random_programs.vocabulary.pointwise import is_integer

OVER_DIM = """
{0}.mean({d}, {k}) | {0}.var({d}, correction=0, keepdim={k}) | {0}.std({d}, correction=0, keepdim={k}) | torch.logsumexp({0}, {d}, {k})
torch.linalg.vector_norm({0}, 2, {d}, {k}) | torch.linalg.vector_norm({0}, 1, {d}, {k}) | torch.prod({0}.clamp(-1.5, 1.5), {d}, {k})
{0} - {0}.mean({d}, True) | {0} / ({0}.abs().sum({d}, True) + 1) | {0} / ({0}.norm(dim={d}, keepdim=True) + 0.5)
F.normalize({0}, dim={d}, eps=0.5)
torch.softmax({0}, {d}) | torch.log_softmax({0}, {d}) | F.softmin({0}, {d}) | torch.logcumsumexp({0}, {d}) | {0}.softmax({d}).sum({d}, {k})
torch.cumprod({0}.sin(), {d}) | {0}.nanmean({d}, {k})
"""
OVER_DIMS = """
{0}.mean({d}, {k}) | torch.std({0}, {d}, correction=0, keepdim={k}) | torch.var({0}, {d}, correction=0, keepdim={k})
torch.logsumexp({0}, {d}, {k})
"""
EXTREMES = """
{0}.amax({d}, {k}) | {0}.amin({d}, {k}) | {0}.max({d}, {k})[0] | {0}.min({d}, {k})[0] | {0}.cummax({d})[0] | {0}.sort({d})[0]
{0}.median({d}, {k})[0]
{0}.topk(1, {d})[0] | {0}.amax({d}, True) - {0} | {0}.kthvalue(1, {d}, {k})[0] | {0}.sort({d}, descending=True)[0]
"""
POSITIONS = """
{0}.argmax({d}, {k}) | {0}.argmin({d}, {k}) | {0}.max({d}, {k})[1] | {0}.min({d}, {k})[1] | ({0} > 0).any({d}, {k})
({0} > 0).all({d}, {k})
({0} > 0).sum({d}, {k}) | {0}.argsort({d}, stable=True) | torch.count_nonzero({0}, {d}) | {0}.sort({d}, stable=True)[1]
({0} >= 0.5).cumsum({d})
"""
INTEGER = """
{0}.sum({d}, {k}) | {0}.amax({d}, {k}) | {0}.amin({d}, {k}) | {0}.argmax({d}, {k}) | {0}.cumsum({d}) | {0}.max({d}, {k})[0]
{0}.prod({d}, {k}) | {0}.any({d}, {k})
"""


def _split(table: str) -> list[str]:
    return [part.strip() for line in table.strip().splitlines() for part in line.split(" | ")]


def _float(scope: Scope, rank: int = 1, *, exact: bool = False) -> Value | None:
    return scope.pick(lambda v: v.dtype.is_floating_point and v.rank >= rank and (v.exact or not exact))


def _filled(scope: Scope, text: str, a: Value) -> str:
    dim = scope.draw.integer(-a.rank, a.rank - 1)
    return text.format(a, d=dim, k=scope.draw.chance(2))


def over_dim(scope: Scope) -> Step | None:
    a = _float(scope)
    return None if a is None else Step(_filled(scope, scope.draw.choose(_split(OVER_DIM)), a), REDUCTION)


def over_dims(scope: Scope) -> Step | None:
    a = _float(scope, 2)
    if a is None:
        return None
    dims = scope.draw.some(range(a.rank), 2) or [0, a.rank - 1]
    text = scope.draw.choose(_split(OVER_DIMS))
    return Step(text.format(a, d=tuple(dims), k=scope.draw.chance(2)), REDUCTION)


def sums(scope: Scope) -> Step | None:
    a = _float(scope)
    if a is None:
        return None
    dims = tuple(scope.draw.some(range(a.rank), 2))
    texts = [
        "{0}.sum({d}, {k})",
        "{0}.cumsum({d0})",
        "{0}.sum()",
        "torch.sum({0}, {d0})",
        "{0}.nansum({d0})",
        "{0}.square().clamp(max=9).sum({d0})",
    ]
    text = scope.draw.choose(texts).format(
        a, d=dims or (0,), k=scope.draw.chance(2), d0=scope.draw.integer(-a.rank, a.rank - 1)
    )
    return Step(text, SUM if "square" not in text else REDUCTION)


def whole(scope: Scope) -> Step | None:
    """Everything to one number."""
    a = _float(scope)
    texts = [
        "{0}.mean()",
        "{0}.amax()",
        "{0}.max()",
        "{0}.min()",
        "{0}.norm()",
        "{0}.var(correction=0)",
        "{0} - {0}.mean()",
        "{0} / ({0}.abs().max() + 1)",
    ]
    return None if a is None else Step(scope.draw.choose(texts).format(a), REDUCTION)


def extremes(scope: Scope) -> Step | None:
    a = _float(scope)
    return None if a is None else Step(_filled(scope, scope.draw.choose(_split(EXTREMES)), a), MOVE)


def positions(scope: Scope) -> Step | None:
    a = _float(scope, exact=True)
    return None if a is None else Step(_filled(scope, scope.draw.choose(_split(POSITIONS)), a), STEP)


def integer(scope: Scope) -> Step | None:
    a = scope.pick(lambda v: is_integer(v) and v.rank >= 1)
    return None if a is None else Step(_filled(scope, scope.draw.choose(_split(INTEGER)), a), STEP)


def moments(scope: Scope) -> Step | None:
    """Two results."""
    a = _float(scope)
    if a is None:
        return None
    text = scope.draw.choose(
        ["torch.var_mean({0}, {d}, correction=0, keepdim={k})", "torch.std_mean({0}, {d}, correction=0, keepdim={k})"]
    )
    return Step(_filled(scope, text, a), REDUCTION, 2)


def normalisation(scope: Scope) -> Step | None:
    a = _float(scope, 2)
    if a is None:
        return None
    dtype = a.dtype
    form = scope.draw.integer(0, 4)
    if form <= 1 or a.rank < 3:
        count = scope.draw.integer(1, a.rank - 1)
        shape = list(a.shape[-count:])
        name = "layer_norm" if form == 0 else "rms_norm"
        if scope.draw.chance(3):
            return Step(f"F.{name}({a}, {shape}, eps=0.1)", REDUCTION)
        weight = scope.fresh(shape, dtype, weight=True)
        if name == "rms_norm":
            return Step(f"F.rms_norm({a}, {shape}, {weight}, eps=0.1)", REDUCTION)
        return Step(
            f"F.layer_norm({a}, {shape}, {weight}, {scope.fresh(shape, dtype, weight=True)}, eps=0.1)", REDUCTION
        )
    channels = a.shape[1]
    if form == 2:
        groups = scope.draw.choose([n for n in range(1, channels + 1) if channels % n == 0] or [1])
        return Step(f"F.group_norm({a}, {groups}, {scope.fresh([channels], dtype, weight=True)}, eps=0.1)", REDUCTION)
    if form == 3:
        return Step(f"F.instance_norm({a}, eps=0.1)", REDUCTION)
    mean, variance = scope.fresh([channels], dtype, weight=True), scope.fresh([channels], dtype, weight=True)
    scale = scope.fresh([channels], dtype, weight=True)
    return Step(
        f"F.batch_norm({a}, {mean}.detach(), {variance}.detach().abs() + 0.5, {scale}, None, False, 0.1, 0.1)",
        REDUCTION,
    )


def loss(scope: Scope) -> Step | None:
    """Losses of classes."""
    a = scope.pick(lambda v: v.dtype is torch.float32 and v.rank == 2 and 0 not in v.shape)
    if a is None:
        return None
    target = scope.fresh([a.shape[0]], torch.int64)
    text = scope.draw.choose(
        [
            "F.cross_entropy({0}, {1}.abs() % {c})",
            "F.cross_entropy({0}, {1}.abs() % {c}, reduction='none')",
            "F.cross_entropy({0}, {1}.abs() % {c}, label_smoothing=0.1)",
        ]
    )
    return Step(text.format(a, target, c=a.shape[1]), SMOOTH)


TEMPLATES = (
    (over_dim, 5),
    (over_dims, 2),
    (sums, 3),
    (whole, 1),
    (extremes, 2),
    (positions, 2),
    (integer, 1),
    (moments, 1),
    (normalisation, 3),
    (loss, 1),
)
