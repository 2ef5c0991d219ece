"""The comparison that decides what is wrong."""

from __future__ import annotations

import math

import torch

from tests.operators.values import copied, difference


def test_copies_keep_strides() -> None:
    """Expanded and transposed tensors stay so, and share no memory with the originals."""
    x = torch.arange(6.0).reshape(2, 3)
    originals = (x.t(), x[:1].expand(4, 3), torch.zeros(()), [x[:, 1:]])
    copies = copied(originals)
    assert [t.stride() for t in (*copies[:3], *copies[3])] == [t.stride() for t in (*originals[:3], *originals[3])]
    copies[0].zero_()
    assert x[1, 2] == 5


def test_wrong_values_are_seen() -> None:
    """A wrong element, a NaN where a number belongs, another dtype or shape: each is a difference."""
    want = torch.tensor([1.0, 2.0, math.nan])
    assert difference(want.clone(), want) == ""
    assert "Mismatched elements" in difference(torch.tensor([1.0, 2.1, math.nan]), want)
    assert difference(torch.tensor([1.0, math.nan, math.nan]), want)
    assert "float64" in difference(want.double(), want)
    assert difference(want[:2], want)
    assert difference((want, want), want)
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_float64_decides_where_eager_is_inexact() -> None:
    """A half result far from eager's is right where it is nearer to what float64 gives, and only there."""
    eager = torch.tensor([1.0, 2.0], dtype=torch.float16)
    exact = torch.tensor([1.1, 2.0], dtype=torch.float64)
    assert difference(exact.half(), eager, lambda: exact) == ""
    assert difference(torch.tensor([1.4, 2.0]).half(), eager, lambda: exact)
    assert difference(torch.tensor([math.nan, 2.0]).half(), eager, lambda: exact)
    assert difference(torch.tensor([math.inf, 2.0]).half(), eager, lambda: exact)


def test_an_exact_eager_leaves_a_few_units() -> None:
    """A few units in the last place are granted where eager is exact, of the value and of the values' size, no more."""
    exact = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    eager = exact.float()
    unit = torch.finfo(torch.float32).eps
    assert difference(eager * (1 + 3 * unit), eager, lambda: exact) == ""
    assert difference(eager * (1 + 20 * unit), eager, lambda: exact)
