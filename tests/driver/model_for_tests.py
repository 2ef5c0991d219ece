"""A model and functions that other processes can import: `aot_compile` saves names of what it compiles."""

from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    """Linear layers with statistics between them; parameters are the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 64) to (n, 8)."""
        hidden = nn.functional.gelu(self.norm(self.first(x)))
        pieces = hidden.unflatten(1, (8, 8)).chunk(2, dim=1)  # views, of which PyTorch's fake tensors know their bases
        result: torch.Tensor = self.last(torch.cat(pieces, dim=1).flatten(1))
        return result


calls: list[int] = []


@torch.library.custom_op("hybrid_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """x + 1; counts its calls."""
    calls.append(1)
    return x + 1


counted.register_fake(torch.empty_like)
plus_one = torch.compiler.allow_in_graph(lambda x: x + 1)


def with_counted(x: torch.Tensor) -> torch.Tensor:
    """2 * (x + 1), by the operator that counts."""
    return counted(x) * 2


def with_unnamed(x: torch.Tensor) -> torch.Tensor:
    """2 * (x + 1), by a function that has no name to import it by."""
    result: torch.Tensor = plus_one(x) * 2
    return result
