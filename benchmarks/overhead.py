"""The cost of a call with next to nothing to compute: ten operators on four numbers.

For peers on Dynamo the cost of its guards is taken off: that of the same model compiled by a backend which returns its result ready
made, timed in turn with the peer in its process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.bench import peers
from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import Peer, Setting
from torch_hybrid_backend.bench.process import WorkerError, WorkerProcess
from torch_hybrid_backend.bench.worker import State, environment
from torch_hybrid_backend.measuring.measure import measure


class TenOperators(nn.Module):
    """Ten operators that no single library call does. x: (4,) float32.  Returns: (4,)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x * 2 + 1) - x
        return (torch.sigmoid(y) * y + x).abs().sqrt() / 3


@dataclass(frozen=True, slots=True)
class Overhead:
    """Message to a worker. Answer: `call_us`, and for peers on Dynamo `beyond_guards_us`."""

    peer: Peer
    threads: int
    scratch: Path
    budget_s: float = 1.0

    def answer(self, state: State) -> dict[str, float]:
        torch.set_num_threads(self.threads)
        if self.peer.packages:
            peers.add_peers_folder()
        model, inputs = TenOperators().eval(), Inputs((torch.tensor([0.1, 0.5, 1.0, 2.0]),))
        expected = inputs.call(model)
        self.scratch.mkdir(parents=True, exist_ok=True)
        call = self.peer.load()(model, inputs, Setting(self.threads, self.scratch)).call
        for _ in range(3):  # hybrid takes its plan from the second call on
            torch.testing.assert_close(_only(call()), expected)
        if not self.peer.on_dynamo:
            (timing,) = measure([call], self.budget_s, max_rounds=100_000)
            return {"call_us": round(timing.median_us, 2)}
        guarded = _guards_only(copy.deepcopy(model), expected)
        inputs.call(guarded)
        own, guards = measure([call, lambda: inputs.call(guarded)], self.budget_s, max_rounds=100_000)
        return {
            "call_us": round(own.median_us, 2),
            "beyond_guards_us": round(own.median_us - guards.median_us, 2),
        }


def _only(result: object) -> torch.Tensor:
    (tensor,) = torch.utils._pytree.tree_leaves(result)
    return tensor  # type: ignore[no-any-return]


def _guards_only(model: nn.Module, result: torch.Tensor) -> Callable[..., object]:
    def backend(_graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., tuple[torch.Tensor]]:
        return lambda *_: (result,)

    compiled: Callable[..., object] = torch.compile(model, backend=backend)
    return compiled


def overheads(asked: Sequence[Peer], threads: int, timeout_s: float, folder: Path, log: Path) -> list[dict[str, Any]]:
    """An entry per peer, in their order; where there is no figure, its "gap" says why. `folder` is for files of theirs."""
    entries: list[dict[str, Any]] = []
    for peer in asked:
        if why := peer.missing():
            entries.append({"peer": peer.name, "gap": why})
            continue
        with WorkerProcess(environment(threads, folder / peer.name), log) as worker:
            try:
                answer = worker.ask(Overhead(peer, threads, folder / f"{peer.name}-files"), timeout_s)
                entries.append({"peer": peer.name} | answer)
            except WorkerError as error:
                entries.append({"peer": peer.name, "gap": str(error)})
    return entries
