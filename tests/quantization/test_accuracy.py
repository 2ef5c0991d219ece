"""Errors of a quantized module, and the warning about them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torch_hybrid_backend import quantize
from torch_hybrid_backend.quantization.accuracy import layer_errors, output_error
from torch_hybrid_backend.quantization.loader import Loader

_LOGGER = "torch_hybrid_backend.quantization.accuracy"


class Two(nn.Module):
    """Two linear layers. One channel of the second one's input is so large that a scale for all of them leaves the others nothing, and what it
    is multiplied by is small."""

    def __init__(self, outlier: float = 1.0) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False)
        with torch.no_grad():
            self.near.weight[0] *= outlier
            self.far.weight[:, 0] /= outlier

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        hidden = self.near(x)
        return {"logits": self.far(hidden), "size": 3, "hidden": (hidden,)}


def _two(outlier: float = 1.0) -> tuple[Two, list[torch.Tensor]]:
    torch.manual_seed(0)
    return Two(outlier).eval(), [torch.randn(5, 16) for _ in range(12)]


def test_outputs_that_are_far_off_are_told_with_the_worst_layer(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with what can be done."""
    model, items = _two(3e3)
    with caplog.at_level(logging.WARNING, _LOGGER):
        quantize(model, items, calibration="naive")
    (record,) = caplog.records
    text = record.getMessage()
    assert "outputs of the Two are off by" in text
    assert text.index("far (") < text.index("near (")
    for way in ("exclude=", "smooth=", "metric="):
        assert way in text


@pytest.mark.parametrize("given", [{"smooth": 0.5}, {"exclude": ("far",)}, {"metric": lambda module: 1.0}, {}])
def test_what_helps_leaves_no_warning(given: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    """All that the warning advises leaves no warning; nor is there one where a model is near enough, or a metric is the judge."""
    model, items = _two(3e3 if given else 1.0)
    with caplog.at_level(logging.WARNING, _LOGGER):
        quantize(model, items, calibration="naive", **given)  # type: ignore[arg-type]
    assert not caplog.records


def test_the_error_is_that_of_the_worst_output() -> None:
    """The error is of tensors of floats in whatever the model returns; what is not finite does not count."""
    model, items = _two(50.0)
    result = quantize(model, items, calibration="naive")
    sums = torch.zeros(2, 2, dtype=torch.float64)
    with torch.no_grad():
        for item in items[:8]:
            wanted, found = ([y["logits"], y["hidden"][0]] for y in (model(item), result(item)))
            for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
                sums[number] += torch.stack([(a - b).double().square().sum(), a.double().square().sum()])
    worst = float((sums[:, 0] / sums[:, 1]).sqrt().max())
    assert worst > 0.01
    assert output_error(result, model, Loader(items, model)) == pytest.approx(worst, rel=1e-6)

    class Divided(Two):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            made = super().forward(x)
            return {"logits": made["logits"] / (torch.arange(4) > 0)}  # type: ignore[operator]

    divided = Divided().eval()
    error = output_error(quantize(divided, items, calibration="naive"), divided, Loader(items, divided))
    assert 0 < error < 0.1


def test_no_number_is_infinitely_far_off(caplog: pytest.LogCaptureFixture) -> None:
    """In whichever output of the quantized module it is; the model's outputs are all numbers."""

    class Rooted(Two):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            made = super().forward(x)
            (hidden,) = made["hidden"]  # type: ignore[misc]
            off = made["logits"] - torch.einsum("ik,jk->ij", hidden, self.far.weight)
            return {**made, "root": (1e-4 - off.abs()).sqrt()}

    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, _LOGGER):
        quantize(Rooted().eval(), [torch.randn(5, 16)], calibration="naive")
    (record,) = caplog.records
    assert "outputs of the Rooted are off by inf" in record.getMessage()


def test_random_numbers_are_no_difference() -> None:
    """A model that draws is compared with the same numbers."""

    class Noisy(Two):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"noise": super().forward(x)["logits"] + 100 * torch.randn(5, 4)}  # type: ignore[operator]

    torch.manual_seed(0)
    model, items = Noisy().eval(), [torch.randn(5, 16)]
    result = quantize(model, items, calibration="naive")
    assert output_error(result, model, Loader(items, model)) < 1e-3


def test_a_look_takes_a_few_items() -> None:
    """A loader of thousands is read once for calibration, not once more for that."""
    model, items = _two()
    result, taken = quantize(model, items, calibration="naive"), []

    class Counting:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number, item in enumerate(items):
                taken.append(number)
                yield item

    data = Loader(Counting(), model)
    taken.clear()
    output_error(result, model, data)
    assert max(taken) <= 8
    taken.clear()
    assert set(layer_errors(result, data)) == {"near", "far"}
    assert len(taken) == len(items)
