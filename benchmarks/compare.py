"""A model of the catalogue at one batch size on several peers, side by side (`torch_hybrid_backend.bench.compare`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks import machine
from benchmarks.catalogue import MODELS
from benchmarks.models import Size
from torch_hybrid_backend.bench import compare as peers_compared
from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import FLOAT32, Peer
from torch_hybrid_backend.bench.process import WorkerError
from torch_hybrid_backend.bench.worker import Work

_CALIBRATION_SEEDS = range(100, 108)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooWork(Work):
    """A model of the catalogue. Its weights may be random, which are off by more than trained ones: no layer returns to float32."""

    model: str
    size: Size
    precision_tolerance: float | None = 1.0

    @property
    def key(self) -> str:
        return f"{self.model}-{self.size}-{self.batch}"

    @property
    def variables(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1"}

    def build(self) -> tuple[nn.Module, Inputs]:
        return MODELS[self.model].build(self.size), self._inputs()

    def calibration(self, inputs: Inputs) -> list[Inputs]:
        """Other inputs than those that are timed."""
        return [self._inputs(seed) for seed in _CALIBRATION_SEEDS]

    def _inputs(self, seed: int = 0) -> Inputs:
        return Inputs(MODELS[self.model].inputs(self.size, self.batch or 1, seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort(peers_compared.Effort):
    """The effort of measuring, and what every peer is given: threads, and the precision of those that have none of their own (`PRECISIONS`)."""

    threads: int
    precision: str = FLOAT32


def compare(
    model: str, size: Size, batch: int, peers: Sequence[Peer], effort: Effort, log: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The results of `bench.compare` with the model, its size, and the revision of this project. Where eager has no result, all have a gap."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        work = ZooWork(
            model=model,
            size=size,
            batch=batch,
            threads=effort.threads,
            folder=Path(folder),
            precision=effort.precision,
        )
        say("reference")
        try:
            facts = peers_compared.reference(work, effort, log)
            found = peers_compared.compare(work, facts, peers, effort, log, say)
        except WorkerError as error:
            gap = {"gap": f"eager has no result: {error}"}
            found = [peers_compared.identity(work, peer) | gap for peer in peers]
    return [{"model": model, "size": size, "revision": machine.revision()} | result for result in found]
