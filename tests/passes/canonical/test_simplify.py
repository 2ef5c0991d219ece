"""Algebra is exact: bitwise the same results on every special value."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.passes.canonical.dead_code import dead_code
from torch_hybrid_backend.passes.canonical.simplify import simplify

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")
SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, -1e-38, 3.4e38, 0.1, 7.3, -2.7]


def rewritten(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(
        y.relu()
        for y in (
            x * 1,
            x / 1.0,
            x - 0,
            aten.neg(aten.neg(x)),
            x / 8,
            x / 0.25,
            aten.pow(x, 2),
            aten.pow(x, 0.5),
            aten.pow(x, -0.5),
            aten.pow(x, -1),
            aten.pow(x, 1),
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rewritten_exactly(captured, dtype):
    """Every rule fires, and gives eager's bits, signs of zero included; float16 keeps its roots as powers."""
    subject = captured(rewritten, torch.tensor(SPECIAL * 3, dtype=torch.float64).to(dtype))
    assert subject.apply(simplify, dead_code, exact=True)
    roots = {"pow.Tensor_Scalar": 2} if dtype == torch.float16 else {"sqrt.default": 1, "rsqrt.default": 1}
    assert subject.operators() == {
        "relu.default": 11,
        "mul.Tensor": 3,
        "reciprocal.default": 1,
        **roots,
    }
    for after, before in zip(subject.run(), subject.before, strict=True):
        assert torch.equal(torch.signbit(after)[~after.isnan()], torch.signbit(before)[~before.isnan()])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 0).relu(),  # -0.0 + 0 is 0.0
        lambda x: (x - (-0.0)).relu(),
        lambda x: (x / 3).relu(),  # 1/3 is not exact
        lambda x: (x / 2.0**127).relu(),  # its reciprocal is subnormal
        lambda x: aten.pow(x, 3).relu(),
        lambda x: x * 1,  # the output must not be the input
        lambda x: torch.ones(3, dtype=torch.int64) / 1 + x.sum(),  # changes the type
    ],
)
def test_left_alone(captured, function):
    """Rewrites that are not exact, or would alias an output, are not made."""
    subject = captured(function, torch.randn(3))
    assert not subject.apply(simplify, exact=True)


def test_integers(captured):
    """Adding zero to integers is nothing."""
    subject = captured(lambda x: (x + 0).abs(), torch.arange(3))
    assert subject.apply(simplify, exact=True)
    assert subject.operators() == {"abs.default": 1}


@pytest.mark.parametrize("p", [1, 1.0])
def test_dropout_of_everything(captured, p):
    """Dropout of everything draws nothing, as in eager; of infinities and NaN it makes NaN. What keeps some elements stays."""
    x = torch.tensor(SPECIAL)
    subject = captured(lambda x: aten.native_dropout(x, p, True), x)
    state = torch.get_rng_state()
    assert subject.apply(simplify)
    assert subject.operators() == {"mul.Tensor": 1, "zeros_like.default": 1}
    torch.testing.assert_close(subject.run()[0], torch.nn.functional.dropout(x, 1.0), equal_nan=True)
    assert not subject.run()[1].any()
    assert torch.equal(torch.get_rng_state(), state)
    some = captured(lambda x: aten.native_dropout(x, 0.5, True)[0], x)
    assert not simplify(some.gm, some.ctx)
    assert not captured(lambda x: aten.native_dropout(x, p, False)[0], x).apply(simplify)
