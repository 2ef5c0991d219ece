"""The trial of a case tells right from wrong: planted models whose compiled results differ, fault or fall apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.ecosystem.case import Case
from tests.ecosystem.trial import attempt


class Planted(nn.Module):
    """A linear layer; its results times `scale`, and off by `compiled` where they come from a compiled model."""

    def __init__(self, compiled: float, scale: float) -> None:
        super().__init__()
        self.layer, self.compiled, self.scale = nn.Linear(16, 16), compiled, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n, 16).  Returns: (n, 16)."""
        return self.scale * self.layer(x) + (self.compiled if torch.compiler.is_compiling() else 0.0)


def _case(compiled: float = 0.0, scale: float = 1.0, train: bool = False) -> Case:
    return Case("recommender/planted", lambda: Planted(compiled, scale), lambda: (torch.randn(8, 16),), train=train)


@pytest.mark.parametrize("train", [False, True])
def test_a_right_model_is_right(train: bool) -> None:
    """Nothing is wrong, one graph (two in training) is compiled, and it is timed where that is asked for."""
    outcome = attempt(_case(train=train), seconds=0.05)
    assert (outcome.wrong, outcome.faults, outcome.breaks) == ("", [], {})
    assert outcome.graphs == (2 if train else 1)
    assert outcome.parameters == 16 * 17
    assert outcome.eager_ms is not None
    assert outcome.hybrid_ms is not None


def test_a_wrong_result_is_seen() -> None:
    """A compiled model that is off by 0.01 is wrong, and the outcome says by how much."""
    outcome = attempt(_case(compiled=0.01))
    assert "up to 0.01 from eager's" in outcome.wrong
    assert outcome.max_error == pytest.approx(0.01, rel=1e-2)


def test_a_model_that_returns_next_to_nothing_is_no_case() -> None:
    """Outputs of 1e-6 would hide every error: the case itself is refused."""
    with pytest.raises(ValueError, match="next to nothing"):
        attempt(_case(scale=1e-6))
