"""Products of one input become one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_hybrid_backend.passes.canonical.cse import cse
from torch_hybrid_backend.passes.cpu.merge_siblings import merge_siblings
from torch_hybrid_backend.passes.hoist import hoist


class Attention(nn.Module):
    """Self-attention of 2 query heads of 4, `key_heads` key heads."""

    def __init__(self, bias: bool = True, key_heads: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q = nn.Linear(7, 8, bias, dtype=dtype)
        self.k = nn.Linear(7, 4 * key_heads, bias, dtype=dtype)
        self.v = nn.Linear(7, 4 * key_heads, bias, dtype=dtype)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


def products(subject) -> int:
    operators = subject.operators()
    return sum(operators[f"{name}.default"] for name in ("mm", "addmm", "linear"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_queries_keys_and_values_are_one_product(captured, bias, key_heads, dynamic):
    """With and without biases, parts of unequal widths, static and symbolic sizes."""
    subject = captured(Attention(bias, key_heads).eval(), torch.randn(2, 5, 7), dynamic=dynamic)
    assert products(subject) == 3
    subject.apply(cse)
    assert subject.apply(merge_siblings)
    assert products(subject) == 1


def test_float64_is_exact_enough(captured):
    """Merging changes no element's sum."""
    subject = captured(Attention(dtype=torch.float64).eval(), torch.randn(1, 3, 7, dtype=torch.float64))
    subject.apply(cse)
    assert subject.apply(merge_siblings)
    torch.testing.assert_close(subject.run(), subject.before, rtol=1e-12, atol=1e-12)


def test_weights_are_joined_outside_the_call(captured):
    """The concatenation depends on parameters alone: no `cat` is left in the main graph."""
    subject = captured(Attention().eval(), torch.randn(2, 5, 7))
    subject.apply(cse)
    assert subject.apply(merge_siblings)
    main = hoist(subject.gm, subject.captured.static_inputs).main
    assert subject.operators()["cat.default"] == 2
    assert subject.operators(main)["cat.default"] == 0


def test_a_product_with_its_activation_stays(captured):
    """A gated MLP: gate and up are fused with what reads them, which a merged product would undo."""
    gate, up = nn.Linear(7, 8), nn.Linear(7, 8)
    subject = captured(lambda x: functional.silu(gate(x)) * up(x), torch.randn(5, 7))
    subject.apply(cse)
    assert not subject.apply(merge_siblings, exact=True)


def test_outputs_keep_their_own_memory(captured):
    """A returned value is not a slice of something larger, directly or through a view."""
    a, b, c = nn.Linear(7, 8), nn.Linear(7, 8), nn.Linear(7, 8)
    subject = captured(lambda x: (a(x), b(x).view(-1), c(x).cumsum(0)), torch.randn(5, 7))
    subject.apply(cse)
    assert not subject.apply(merge_siblings, exact=True)


def test_a_view_that_slices_do_not_allow_stops_it(captured):
    """A view across rows needs dense rows."""
    a, b = nn.Linear(7, 8), nn.Linear(7, 8)
    subject = captured(lambda x: a(x).view(-1).cumsum(0) + b(x).view(-1).cumsum(0), torch.randn(5, 7))
    subject.apply(cse)
    assert not subject.apply(merge_siblings, exact=True)


def test_unlike_products_stay_apart(captured):
    """Another input, a bias more, a weight that is no parameter."""
    a, b = nn.Linear(7, 8), nn.Linear(7, 8, bias=False)

    def model(x, w):
        return a(x).cumsum(0) + b(x).cumsum(0) + (x @ w).cumsum(0) + (x.sin() @ b.weight.t()).cumsum(0)

    subject = captured(model, torch.randn(5, 7), torch.randn(7, 8))
    subject.apply(cse)
    assert not subject.apply(merge_siblings, exact=True)


def test_no_rows(captured):
    """An empty batch."""
    subject = captured(Attention().eval(), torch.randn(0, 5, 7))
    subject.apply(cse)
    assert subject.apply(merge_siblings)


def test_large_products_stay_apart(captured):
    """Large products take so long that what merging saves is nothing."""
    a, b = nn.Linear(256, 256), nn.Linear(256, 256)
    subject = captured(lambda x: a(x).cumsum(0) + b(x).cumsum(0), torch.randn(1024, 256))
    assert not subject.apply(merge_siblings, exact=True)
