"""Products of pairs of rows: sums of integers, exactly, by the arithmetic in place of AArch64's instructions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engines.cpu.arm_for_tests import OPTIONS, random_bytes


class _Product(nn.Module):
    """A product of integers of 8 bits by constant ones, (K, N), in float32, which holds the sums."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * 0.5) @ (self.weight.float() * 0.5)


@pytest.mark.parametrize(
    ("left", "right"), [("int8", "int8"), ("uint8", "int8"), ("uint8", "uint8"), ("int8", "uint8")]
)
def test_pairs_of_rows_are_exact(left: str, right: str) -> None:
    """Odd numbers of rows too, and ones that are known only at run time; columns and depths that fill no vector."""
    torch.manual_seed(0)
    for depth, columns, sizes in ((24, 48, (6, 7, 30)), (24, 40, (5,)), (21, 13, (5,)), (8, 3, (2,))):
        model = _Product(random_bytes((depth, columns), getattr(torch, right)))
        with torch.no_grad():
            compiled = torch.compile(
                model, backend="hybrid", options={**OPTIONS, "target": "neoverse-v1"}, dynamic=len(sizes) > 1
            )
            for rows in sizes:
                x = random_bytes((rows, depth), getattr(torch, left))
                assert torch.equal(compiled(x), model(x)), (depth, columns, rows)
