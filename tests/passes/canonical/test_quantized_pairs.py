"""Pairs of dequantizing and quantizing by the same numbers vanish, and nothing changes by a bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch.nn import functional

from torch_hybrid_backend.passes.canonical.dead_code import dead_code
from torch_hybrid_backend.passes.canonical.quantized_pairs import _Numbers, quantized_pairs

quantized = torch.ops.quantized_decomposed
UNSIGNED, SIGNED = (0.02, 0, 0, 255, torch.uint8), (0.1, -3, -128, 127, torch.int8)


def _q(x: torch.Tensor, numbers=UNSIGNED) -> torch.Tensor:
    return quantized.quantize_per_tensor.default(x, *numbers)


def _dq(q: torch.Tensor, numbers=UNSIGNED) -> torch.Tensor:
    return quantized.dequantize_per_tensor.default(q, *numbers)


def _everything(numbers) -> torch.Tensor:
    """Every integer of the dtype, some of them twice."""
    return torch.arange(numbers[2], numbers[3] + 1).to(numbers[4]).roll(7).repeat(2).reshape(2, 4, 8, 8)


def _count(subject) -> int:
    return sum(count for name, count in subject.operators().items() if "quantize" in name)


THROUGH = {
    "nothing": lambda x: x,
    "views": lambda x: x.permute(0, 2, 3, 1).flatten(1)[:, 5:].unsqueeze(1).contiguous(),
    "cat": lambda x: torch.cat([x, x[:, :2]], 1),
    "pooling": lambda x: functional.max_pool2d(x, 3, stride=2, padding=1),
    "relu": torch.relu,
    "relu6": functional.relu6,
    "clamps": lambda x: x.clamp(-0.35, 1.234).clamp_min(0.07).clamp_max(1.0),
    "hardtanh": functional.hardtanh,
    "all": lambda x: torch.relu(functional.max_pool2d(torch.cat([x, x.relu()]), 2)).flatten(1),
}


@pytest.mark.parametrize("numbers", [UNSIGNED, SIGNED], ids=["u8", "s8"])
@pytest.mark.parametrize("name", THROUGH)
def test_pairs_vanish(captured, name: str, numbers) -> None:
    """Also through views, concatenation, max pooling and clamps, for every integer: results are equal bit by bit."""
    subject = captured(lambda q: _q(THROUGH[name](_dq(q, numbers)), numbers).clone(), _everything(numbers))
    before = _count(subject)
    assert subject.apply(quantized_pairs, exact=True)
    dead_code(subject.gm, subject.ctx)
    assert (before > 0, _count(subject)) == (True, 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda q: _q(_dq(q), (0.03, *UNSIGNED[1:])),
        lambda q: _q(_dq(q), (0.02, 1, *UNSIGNED[2:])),
        lambda q: _q(_dq(q) + 0.001),
        lambda q: _q(functional.avg_pool2d(_dq(q), 2)),
        lambda q: _q(_dq(q, (1e-38, *UNSIGNED[1:])), (1e-38, *UNSIGNED[1:])),
        lambda q: _q(functional.max_pool2d(_dq(q), 2, return_indices=True)[1].float()),
        lambda q: _q(_dq(q, (0.02, 0, 0, 100, torch.uint8)), (0.02, 0, 0, 100, torch.uint8)),
    ],
)
def test_others_stay(captured, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Other numbers, arithmetic between, scales whose reciprocal is no normal number, and integers that may lie beyond the bounds."""
    subject = captured(function, _everything(UNSIGNED))
    assert not subject.apply(quantized_pairs, exact=True)


def test_saturation_does_what_a_clamp_did(captured) -> None:
    """A ReLU before unsigned integers, and a ReLU6 whose range is theirs, are dropped; one that something else reads, or whose ends lie
    elsewhere, stays."""
    x = torch.cat([torch.randn(997) * 4, torch.tensor([torch.inf, -torch.inf, -0.0])])
    six = (6 / 255, *UNSIGNED[1:])
    for function, numbers in ((torch.relu, UNSIGNED), (functional.relu6, six)):
        subject = captured(lambda v, f=function, n=numbers: _q(f(v), n), x)
        assert subject.apply(quantized_pairs, exact=True)
        assert sum(subject.operators().values()) == 1
    for kept in (
        lambda v: _q(functional.relu6(v), (0.05, *UNSIGNED[1:])),
        lambda v: _q(torch.relu(v), SIGNED),
        lambda v: (_q(y := torch.relu(v)), y),
    ):
        assert not captured(kept, x).apply(quantized_pairs, exact=True)


def test_integers_are_pooled(captured) -> None:
    """Values quantized behind max pooling are quantized before it, the ReLU before that dropped; not where the maxima are read otherwise."""
    x = torch.randn(2, 3, 9, 9)

    def pooled(v: torch.Tensor) -> torch.Tensor:
        return functional.max_pool2d(torch.relu(v), 3, stride=2, padding=1)

    subject = captured(lambda v: _q(pooled(v)), x)
    assert subject.apply(quantized_pairs, exact=True)
    assert "relu.default" not in subject.operators()
    (pool,) = [node for node in subject.gm.graph.nodes if "max_pool" in str(node.target)]
    assert pool.args[0].meta["val"].dtype == torch.uint8
    assert not captured(lambda v: (_q(y := pooled(v)), y), x).apply(quantized_pairs, exact=True)


def test_numbers_are_quantized_as_pytorch_does() -> None:
    """The ends of clamps, ties among them."""
    for numbers in (UNSIGNED, SIGNED, (0.5, 3, 0, 255, torch.uint8), (1 / 3, 0, -128, 127, torch.int8)):
        values = torch.cat([torch.arange(-40, 40) * 0.25, torch.randn(200) * 9, torch.tensor([torch.inf, -torch.inf])])
        assert [_Numbers(*numbers).quantized(float(v)) for v in values] == _q(values, numbers).tolist()


def test_padding_is_left_to_convolutions(captured) -> None:
    """Zeros put around what a convolution's input is quantized from are put around the dequantized input, the ReLU before them dropped. Not
    where they are no zeros, are more channels, or where something else reads the padded values or their integers."""
    x, w = torch.randn(2, 3, 7, 8), torch.randn(5, 3, 3, 3)

    def convolved(v: torch.Tensor, pad=(1, 0, 2, 1), value: float = 0.0, weight: torch.Tensor = w) -> torch.Tensor:
        return functional.conv2d(_dq(_q(functional.pad(torch.relu(v), pad, value=value))), weight)

    shifted = (0.02, 7, 0, 255, torch.uint8)
    for function in (
        convolved,
        lambda v: functional.conv2d(_dq(_q(functional.pad(v, (1, 1)), shifted), shifted), w),
    ):
        subject = captured(function, x)
        assert subject.apply(quantized_pairs, exact=True)
        assert "relu.default" not in subject.operators()
        (pad,) = [node for node in subject.gm.graph.nodes if "pad" in str(node.target)]
        assert "dequantize" in str(pad.args[0].target)
        assert all("convolution" in str(user.target) for user in pad.users)
    for kept in (
        lambda v: convolved(v, value=0.5),
        lambda v: convolved(v, pad=(-1, 1)),
        lambda v: convolved(v, pad=(0, 0, 0, 0, 0, 1), weight=torch.cat([w, w[:, :1]], 1)),
        lambda v: (functional.conv2d(_dq(_q(y := functional.pad(v, (1, 1)))), w), y),
        lambda v: (functional.conv2d(y := _dq(_q(functional.pad(v, (1, 1)))), w), y.abs()),
        lambda v: (functional.conv2d(_dq(q := _q(functional.pad(v, (1, 1)))), w), q),
    ):
        assert not captured(kept, x).apply(quantized_pairs, exact=True)


def test_what_is_quantized_is_quantized_at_once(captured) -> None:
    """Behind what it is made of, whatever the program computes in between; an input of the graph is quantized where it is read."""
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    subject = captured(lambda x, y: (z := x.sin(), torch.exp(y), _q(z), _q(y))[1:], x, y)
    assert subject.apply(quantized_pairs, exact=True)
    names = [str(node.target).split(".")[-2] for node in subject.gm.graph.nodes if node.op == "call_function"]
    assert names == ["sin", "quantize_per_tensor", "exp", "quantize_per_tensor"]
    assert not subject.apply(quantized_pairs, exact=True)


def _kinds(subject) -> list[str]:
    """The operators in their order, scales left out."""
    return [str(node.target).split(".")[1] for node in subject.gm.graph.nodes if node.op == "call_function"]


def test_what_is_concatenated_is_quantized_first(captured) -> None:
    """Each part once, where it is made; what is integer already stays so, and clamps that saturation does vanish."""
    q, x = _everything(UNSIGNED), torch.randn(2, 4, 8, 8)

    def function(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return _q(torch.cat([torch.relu(x + 1), _dq(q), y, y], 1))

    subject = captured(function, q, x)
    assert subject.apply(quantized_pairs, exact=True)
    dead_code(subject.gm, subject.ctx)
    assert sorted(_kinds(subject)) == sorted(["add", "quantize_per_tensor", "mul", "quantize_per_tensor", "cat"])
    assert _kinds(subject)[-1] == "cat"


def test_parts_of_other_numbers_are_quantized_anew(captured) -> None:
    """Parts dequantized by the same numbers are taken as they are; the other part is not."""
    other = (0.03, *UNSIGNED[1:])
    subject = captured(lambda q: _q(torch.cat([_dq(q), _dq(q, other)])), _everything(UNSIGNED))
    assert subject.apply(quantized_pairs, exact=True)
    dead_code(subject.gm, subject.ctx)
    assert sorted(_kinds(subject)) == ["cat", "dequantize_per_tensor", "quantize_per_tensor"]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(2, 4, 64).permute(0, 2, 1),
        lambda x: x.permute(0, 2, 3, 1).reshape(2, 8, 32),
        lambda x: x.transpose(1, 2).unsqueeze(1).contiguous(),
    ],
)
def test_views_in_concatenations_are_of_integers(captured, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Views in concatenations are quantized before, in the kernel that makes them; where they are not joined, they stay as they are."""
    x = torch.randn(2, 4, 8, 8)
    subject = captured(lambda x: _q(torch.cat([view(torch.tanh(x)), view(x * 2)]), SIGNED).clone(), x)
    assert subject.apply(quantized_pairs, exact=True)
    assert _kinds(subject)[:4] == ["tanh", "quantize_per_tensor", "mul", "quantize_per_tensor"]
    assert not captured(lambda x: _q(view(torch.tanh(x)), SIGNED), x).apply(quantized_pairs, exact=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: _q(torch.cat([x.tanh(), x])),  # an input: no kernel makes it
        lambda x: _q(torch.cat([x.tanh()[:, :2], x.sin()], 1)),  # fewer elements than were made
        lambda x: _q(torch.cat([x.tanh()[:, :1].expand(2, 4, 8, 8), x.sin()])),  # more
        lambda x: (y := torch.cat([x.tanh(), x.sin()]), _q(y))[::-1],  # somebody else reads it
        lambda x: _q(torch.cat([x.tanh(), x.double()]).float()),
    ],
)
def test_what_others_need_in_float_stays(captured, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Inputs, parts of a tensor, copies of its elements, and what is read otherwise: quantized where they are joined, in one kernel."""
    subject = captured(function, torch.randn(2, 4, 8, 8))
    assert not subject.apply(quantized_pairs, exact=True)
