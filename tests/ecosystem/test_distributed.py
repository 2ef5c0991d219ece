"""Several processes that compute together over gloo."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.ecosystem import rank_programs
from tests.ecosystem.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo


def test_a_parameter_that_changes_on_one_rank(tmp_path: Path) -> None:
    """An all-gather of a parameter runs in every call, on every rank: also where the parameter changed on one rank alone."""
    ranks = run_ranks(rank_programs.gathered_parameter, tmp_path)
    first, second = (rank["w"] for rank in ranks)
    before, after = (torch.relu(torch.ones(4, 16) @ torch.cat([w, second]).t()) for w in (first / 2, first))
    for rank in ranks:
        torch.testing.assert_close(rank["results"], [before, before, after, after])
