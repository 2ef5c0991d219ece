"""The zoo's models are worth testing with: reproducible, of sane magnitude, without parts that are the identity."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models import ZOO, tensors
from benchmarks.networks import LstmLayer


@pytest.mark.parametrize("name", list(ZOO))
def test_outputs_are_of_order_one(name: str) -> None:
    """Activations neither vanish nor overflow, and outputs differ between samples."""
    model = ZOO[name].build("small")
    with torch.no_grad():
        first = tensors(model(*ZOO[name].inputs("small", batch=2)))[0]
    assert 0.01 < first.std().item() < 10
    assert not torch.allclose(first[0], first[1], rtol=0.05)


def test_builds_are_reproducible() -> None:
    """Two builds with one seed are equal bit by bit, in weights and in inputs; another seed differs."""
    entry = ZOO["resnet50"]
    first, second, other = (entry.build("small", seed=seed) for seed in (0, 0, 1))
    inputs = entry.inputs("small", batch=2)
    assert torch.equal(inputs[0], entry.inputs("small", batch=2)[0])
    with torch.no_grad():
        assert torch.equal(first(*inputs).logits, second(*inputs).logits)
        assert not torch.equal(first(*inputs).logits, other(*inputs).logits)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y", "unet"])
def test_batch_norms_are_not_the_identity(name: str) -> None:
    """Running means are not 0, variances and scales not 1, biases not 0: a wrong fold shows."""
    norms = [module for module in ZOO[name].build("small").modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        assert norm.running_mean.abs().max() > 1e-3
        assert (norm.running_var - 1).abs().max() > 1e-2
        assert (norm.weight - 1).abs().max() > 1e-2
        assert norm.bias.abs().max() > 1e-3


def test_building_leaves_the_random_state() -> None:
    """Building a model does not disturb the caller's random numbers."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    ZOO["unet"].build("small")
    ZOO["unet"].inputs("small", batch=1)
    assert torch.equal(torch.rand(4), expected)


def test_lstm_layer_is_torch_lstm() -> None:
    """The LSTM written out computes what `torch.nn.LSTM` does with the same weights."""
    torch.manual_seed(0)
    ours, theirs = LstmLayer(8, 16), nn.LSTM(8, 16, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.from_input.weight)
        theirs.bias_ih_l0.copy_(ours.from_input.bias)
        theirs.weight_hh_l0.copy_(ours.from_hidden.weight)
        theirs.bias_hh_l0.copy_(ours.from_hidden.bias)
        x = torch.randn(2, 5, 8)
        torch.testing.assert_close(ours(x), theirs(x)[0])
