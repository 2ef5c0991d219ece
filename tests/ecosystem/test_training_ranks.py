"""Training on several ranks over gloo: losses and parameters of 20 steps, beside eager on the same ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.distributed import WAYS
from tests.ecosystem import rank_programs
from tests.ecosystem.ranks import needs_gloo, run_ranks

pytestmark = [needs_gloo, pytest.mark.full]  # each compiles on two or four ranks


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps(way: str, world: int, tmp_path: Path) -> None:
    """Losses and parameters equal eager's; ranks end with the same parameters, to the last bit."""
    ranks = run_ranks(rank_programs.trained, tmp_path, ({"RANKS_WAY": way},) * world)
    for rank in ranks:
        compiled, eager = rank["hybrid"], rank["eager"]
        assert compiled["graphs"] > 0
        torch.testing.assert_close(compiled["losses"], eager["losses"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(compiled["parameters"], eager["parameters"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(compiled["parameters"], ranks[0]["hybrid"]["parameters"], rtol=0, atol=0)
