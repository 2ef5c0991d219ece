"""DistributedDataParallel over two processes with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem.ddp_rank import RATE, STEPS, batches, gradients_of, network

_ROOT = Path(__file__).resolve().parents[2]
_WORLD = 2


def _train(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.ecosystem.ddp_rank",
                str(rank),
                str(_WORLD),
                str(folder / "store"),
                str(folder / f"{rank}.pt"),
            ],
            cwd=_ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(_WORLD)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=280)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(_WORLD)]


def _reference() -> list[dict[str, torch.Tensor]]:
    """The gradients of each step, averaged over the ranks' batches, in eager and one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(_WORLD):
            (model(batches(rank)[step]).square().mean() / _WORLD).backward()
        history.append(gradients_of(model))
        optimizer.step()
    return history


@pytest.mark.full  # two processes that both compile
@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)
def test_gradients_of_two_processes(tmp_path: Path) -> None:
    """Each rank compiles the pieces that DDPOptimizer cuts; the gradients of every step equal eager's, and are the same on both."""
    ranks = _train(tmp_path)
    expected = _reference()
    for rank in ranks:
        torch.testing.assert_close(rank["gradients"], expected, rtol=1e-3, atol=1e-6)
        assert rank["graphs"] >= 3
    torch.testing.assert_close(ranks[0]["gradients"], ranks[1]["gradients"], rtol=0, atol=0)
