"""SmoothQuant's factors: layers that read the same tensor have them in common."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_hybrid_backend import explain, quantize
from torch_hybrid_backend.quantization.ranges import Site
from torch_hybrid_backend.quantization.smoothing import Channels, scaled, with_least_error


class Projections(nn.Module):
    """Queries, keys and values of one tensor whose channels differ, and a layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, 32)."""
        return self.out(torch.relu(self.q(x)) * torch.sigmoid(self.k(x)) + self.v(x))


def _projections() -> tuple[Projections, list[torch.Tensor]]:
    torch.manual_seed(0)
    size = torch.ones(32)
    size[3], size[9] = 40.0, 0.02
    return Projections().eval(), [torch.randn(64, 32) * size for _ in range(3)]


def test_factors_are_those_of_the_paper() -> None:
    """max|x|^a / max|w|^(1 - a); channels that are zero stay as they are; what is scaled away comes back by the weight."""
    x = torch.tensor([[4.0, -1.0, 0.0], [2.0, 0.5, 0.0]])
    w = torch.tensor([[1.0, 0.25, 3.0], [-0.5, 0.1, 1.0]])
    channels = Channels()
    channels.linear("a", 0, x, w)
    site = channels.smoothed({"a": Site("linear")}, 0.5)["a"]
    assert site.smoothing is not None
    factors = torch.tensor(site.smoothing)
    torch.testing.assert_close(factors, torch.tensor([2.0, 2.0, 1.0]))
    torch.testing.assert_close(scaled(x, factors) @ (w * factors).T, x @ w.T)


def test_layers_that_read_the_same_are_a_group() -> None:
    """Their factors are of the largest of their weights. A layer that reads something else once is by itself, and so is one that reads what
    has been written to in between."""
    x, other = torch.rand(4, 2) + 1, torch.rand(4, 2) + 1
    channels = Channels()
    small, large = torch.full((3, 2), 0.5), torch.full((3, 2), 2.0)
    for name, w in (("q", small), ("k", large), ("late", small)):
        channels.linear(name, 0, x, w)
    channels.linear("q", 0, other, small)
    channels.linear("k", 0, other, large)
    channels.linear("late", 0, torch.rand(4, 2), small)
    x.add_(1)
    channels.linear("written", 0, x, small)
    assert channels.groups == [["q", "k"], ["late"], ["written"]]
    sites = channels.smoothed({name: Site("linear") for name in ("q", "k", "late", "written")}, 0.0)
    assert sites["q"].smoothing == sites["k"].smoothing == (0.5, 0.5)
    assert sites["written"].smoothing == (2.0, 2.0)


def test_a_group_takes_one_way() -> None:
    """The one with the least squares together. A way that does not know one of its layers is none."""
    ways = [
        {"q": Site("linear", smoothing=(1.0,)), "k": Site("linear", smoothing=(1.0,)), "c": Site("conv")},
        {"q": Site("linear", smoothing=(2.0,)), "k": Site("linear", smoothing=(2.0,))},
        {"q": Site("linear")},
    ]
    errors = [{"q": 0.1, "k": 0.4, "c": 0.1}, {"q": 0.2, "k": 0.2}, {"q": 0.0}]
    assert with_least_error([["q", "k"]], ways, errors) == {**ways[1], "c": Site("conv")}
    assert with_least_error([["q"], ["k"]], ways, errors) == {"q": Site("linear"), "k": ways[1]["k"], "c": Site("conv")}


def test_queries_keys_and_values_are_quantized_alike() -> None:
    """The three have one set of factors, kept once, and one range: kernels scale and quantize what the three read once."""
    model, data = _projections()
    quantized = quantize(model, data, calibration="naive", smooth=(0.5, 0.8))
    sites = quantized.ranges.sites
    assert sites["q"].smoothing is not None
    assert sites["q"] == sites["k"] == sites["v"]
    kept = [name for name, _ in quantized.named_buffers() if name.startswith("smoothing_")]
    assert len(kept) == len({site.smoothing for site in sites.values() if site.smoothing})
    by_estimate = {"placement": "estimate"}  # so small a model is eager's now and then
    with torch.no_grad():
        plain = quantize(model, data, calibration="naive")
        smoothed, unsmoothed = (
            sum(
                len(region.kernels)
                for plan in explain(module, data[0], options=by_estimate).plans
                for region in plan.regions
            )
            for module in (quantized, plain)
        )
    assert smoothed == unsmoothed > 0  # their input is not quantized for each
    compiled = torch.compile(quantized, backend="hybrid", fullgraph=True)
    expected = model(data[0])
    for _ in range(2):
        assert (compiled(data[0]) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("drop", [-0.1, float("nan")])
def test_no_model_is_better_than_itself(drop: float) -> None:
    """A drop below nothing can be met by no layers in floating point at all."""
    model, data = _projections()
    with pytest.raises(ValueError, match="max_drop must be 0 or more"):
        quantize(model, data, metric=lambda module: 1.0, max_drop=drop)
