"""Weights are folded and packed once: by the first call, for itself and for the plan of all later ones. Or not at all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.end_to_end import models
from torch_hybrid_backend.engines.cpu.operands import packed_operands
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.runtime.constants import FoldPart


@pytest.mark.parametrize("placement", ["estimate", "measure"])
def test_once_for_every_variant_and_the_plan(placement: str, settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the first call tries, each weight is packed once, and one that changed once more."""
    made: Counter[str] = Counter()

    def counting(name: str, pack: object) -> object:
        def counted(*arguments: object, **settings: object) -> object:
            made[name] += 1
            return pack(*arguments, **settings)  # type: ignore[operator]

        return counted

    settings.setenv("HYBRID_CACHE_DIR", str(tmp_path))  # nothing is known yet: variants are tried
    settings.setattr(packed_operands, "pack_conv_weight", counting("packed", packed_operands.pack_conv_weight))
    settings.setattr(packed_operands, "pack_b", counting("packed", packed_operands.pack_b))
    model, images = models.convolutional(), models.images()

    def counted_part(reads: object, gives: object, run: object, text: str) -> FoldPart:
        return FoldPart(reads, gives, counting("folded", run) if text else run, text)  # type: ignore[arg-type]

    settings.setattr("torch_hybrid_backend.driver.prepared.FoldPart", counted_part)
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", options={"placement": placement})
        for _ in range(3):
            torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-4)
        assert made == {"folded": 1, "packed": 3}
        model.stem.weight.mul_(-2)
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-4)
        if placement == "estimate":  # where it is timed, eager may be faster
            assert made == {"folded": 2, "packed": 4}  # the others are as they were


class _Columns(torch.nn.Module):
    """A linear layer whose weight lies (K, N)."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.parametrize("layer", [torch.nn.Linear, _Columns])
def test_linear_layers_of_many_rows_read_their_own_weight(
    layer: type[torch.nn.Module], settings: pytest.MonkeyPatch
) -> None:
    """Nothing is packed, and a changed weight is seen."""

    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("a weight was packed")

    settings.setattr(packed_operands, "pack_b", refuse)
    columns = 24 * 16 * Target.host().cores
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(layer(72, columns), torch.nn.GELU()), torch.randn(2, 64, 72)
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", options={"placement": "estimate", "strict": True})
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
            model[0].weight.mul_(-2)
