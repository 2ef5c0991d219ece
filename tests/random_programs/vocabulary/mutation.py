"""Writing in place: to inputs, to intermediate values and to views of either."""

from __future__ import annotations

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, SMOOTH
from tests.random_programs.scope import Scope, Step
from tests.random_programs.vocabulary.pointwise import partner

SIMPLE = (
    ("{0}.add_(1)", ARITHMETIC),
    ("{0}.mul_(0.5)", ARITHMETIC),
    ("{0}.neg_()", MOVE),
    ("{0}.relu_()", MOVE),
    ("{0}.zero_()", MOVE),
    ("{0}.fill_(1.5)", MOVE),
    ("{0}.clamp_(-1, 1)", MOVE),
    ("{0}.sin_()", SMOOTH),
    ("{0}.tanh_()", SMOOTH),
    ("{0}[..., :1].mul_(2)", ARITHMETIC),
    ("{0}[..., ::2] = 0.25", MOVE),
    ("{0}.T.add_(0.5)", ARITHMETIC),
    ("{0}.flatten()[0] = 1", MOVE),
    ("F.silu({0}, inplace=True)", SMOOTH),
    ("{0}.select(-1, 0).add_(1)", ARITHMETIC),
    ("{0}.narrow(0, 0, 1).mul_(2)", ARITHMETIC),
    ("{0}.unsqueeze(0).transpose(0, -1).mul_(0.5)", ARITHMETIC),
    ("{0}.chunk(2, -1)[0].zero_()", MOVE),
    ("{0}.diagonal().fill_(0.5)", MOVE),
    ("{0}.unflatten(-1, (-1, 1)).squeeze(-1).abs_()", MOVE),
    ("{0}.index_fill_(0, torch.zeros(1, dtype=torch.int64), 0.5)", MOVE),
    ("{0}.scatter_(-1, torch.zeros({0}.shape[:-1] + (1,), dtype=torch.int64), 0.25)", MOVE),
    ("{0}.masked_fill_(torch.arange({0}.shape[-1]) % 2 == 0, 0.5)", MOVE),
    ("{0}[torch.arange({0}.shape[0]).flip(0)] = 0.5 * {0}", ARITHMETIC),
    ("{0}.index_add_(0, torch.arange({0}.shape[0]).flip(0), {0}.clone())", ARITHMETIC),
)
PAIRED = (
    ("{0}.add_({1})", ARITHMETIC),
    ("{0}.sub_({1}, alpha=0.5)", ARITHMETIC),
    ("{0}.mul_({1})", ARITHMETIC),
    ("{0}.copy_({1})", MOVE),
    ("{0}.addcmul_({1}, {1}, value=0.25)", ARITHMETIC),
    ("{0}[...] = {1}", MOVE),
    ("{0}[..., :1] += {1}[..., :1]", ARITHMETIC),
    ("{0}.lerp_({1}, 0.5)", ARITHMETIC),
)


def in_place(scope: Scope) -> Step | None:
    a = scope.pick(lambda v: v.dtype.is_floating_point and v.rank >= 1 and scope.is_writable(v))
    if a is None:
        return None
    if scope.draw.chance(2):
        text, kind = scope.draw.choose(SIMPLE)
        return Step(text.format(a), kind, 0)
    text, kind = scope.draw.choose(PAIRED)
    return Step(text.format(a, partner(scope, a)), kind, 0)


def in_place_integer(scope: Scope) -> Step | None:
    a = scope.pick(lambda v: v.dtype in (torch.int64, torch.int32) and v.rank >= 1 and scope.is_writable(v))
    if a is None:
        return None
    return Step(
        scope.draw.choose(["{0}.add_(1)", "{0}.mul_(2)", "{0}[0] = 3", "{0}.bitwise_and_(7)"]).format(a), MOVE, 0
    )


TEMPLATES = ((in_place, 5), (in_place_integer, 1))
