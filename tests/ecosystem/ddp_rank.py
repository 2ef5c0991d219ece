"""One rank of tests/ecosystem/test_distributed.py: `python -m tests.ecosystem.ddp_rank RANK WORLD STORE OUT`.

Trains a few steps under DistributedDataParallel, compiled, and saves the gradients of every step to OUT.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

STEPS, RATE = 3, 0.1


class Network(nn.Module):
    """Layers large enough to fill buckets of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(24, 512), nn.LayerNorm(512))
        self.middle = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU())
        self.last = nn.Linear(512, 5)

    # Its own code, not nn.Sequential's: DDP's forward breaks the graph, and Dynamo begins anew with the user's code only.
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def network() -> nn.Module:
    """The same weights on each call."""
    torch.manual_seed(0)
    return Network()


def batches(rank: int) -> list[torch.Tensor]:
    """What one rank trains on."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 24, generator=generator) for _ in range(STEPS)]


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients, by parameter."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def main(rank: int, world: int, store: str, out: str) -> None:
    """Train, and save what this rank saw."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = network()
    # DDPOptimizer cuts the graph at the borders of the buckets, so that gradients travel early.
    counter = CompileCounterWithBackend("hybrid")
    fast = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    history = []
    for x in batches(rank):
        optimizer.zero_grad()
        fast(x).square().mean().backward()
        history.append(gradients_of(model))
        optimizer.step()
    torch.save({"gradients": history, "graphs": counter.frame_count}, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
