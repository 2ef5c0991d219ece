"""What the ranks of tests/ecosystem/test_distributed.py run: each function is one rank's program (see `ranks.run_ranks`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional
from torch import nn

# Since torch 2.13 the old name warns.
all_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)


class Gathering(nn.Module):
    """Each rank owns some rows of a matrix; the forward gathers them all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ all_gather(self.w, 0, torch.distributed.group.WORLD).t())


def gathered_parameter(rank: int) -> dict[str, Any]:
    """The results before and after the parameter of rank 0 alone changed, and at the end the parameter."""
    model = Gathering(rank)
    fast = torch.compile(model, backend="hybrid")
    x = torch.ones(4, 16)
    results = []
    with torch.no_grad():
        for call in range(4):
            if call == 2 and rank == 0:
                model.w.mul_(2)
            results.append(fast(x))
    return {"results": results, "w": model.w.detach()}
