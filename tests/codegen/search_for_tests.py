"""Regions with kernels that have variants, and an engine whose kernels take the times that a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.services_for_tests import services
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.program import OperatorCall, Program
from torch_hybrid_backend.engines.cpu import backend as backend_module
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

Arguments = tuple[torch.Tensor, ...]


@pytest.fixture
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have the same variants on every processor: none on AMX's tiles."""
    monkeypatch.setattr(backend_module, "may_use_tiles", lambda: False)


def _convolution(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The second has two output channel blocks at the least, so that its schedule has choices."""
    return torch.convolution(
        torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).relu(),
        v,
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    )


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Arguments]]] = {
    "convolutions": (
        _convolution,
        lambda: (torch.randn(1, 19, 23, 29), torch.randn(67, 19, 3, 3), torch.randn(53, 67, 1, 1)),
    ),
    "matmuls": (lambda x, w: (x @ w).relu() @ w, lambda: (torch.randn(31, 211), torch.randn(211, 211))),
}


# As much work in both, so that one may be slow; each has an operator of oneDNN's.
TWO_LAYERS: tuple[Callable[..., torch.Tensor], Callable[[], Arguments]] = (
    lambda x, v, w: torch.mm(torch.mm(x, v).relu(), w).tanh(),
    lambda: (torch.randn(64, 200), torch.randn(200, 200).t() / 14, torch.randn(200, 200) / 14),
)


class Recorded:
    """A program as a function whose kernels take the times that the test says, by the kernel's name; else as they are."""

    def __init__(self, program: Program, us: Mapping[str, float]) -> None:
        self.program, self.us, self.run = program, us, ProgramRunner(program)
        self.release = self.run.release

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.run(inputs)

    @property
    def arena_bytes(self) -> int:
        return self.run.arena_bytes

    def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
        if self.us.get("fail") == len(self.program.steps):
            raise HybridError("no")
        real = self.run.kernel_us(inputs)
        assert len(real) == len(self.program.steps)
        assert all(us > 0 for us in real)
        names = [k.name if isinstance(k, OperatorCall) else k.symbol for k in self.program.steps]
        return [self.us.get(name, 100.0) for name in names]


def config(placement: str = "measure") -> Config:
    return Config(placement=placement, compile_threads=2)


def engine_in(folder: Path, placement: str = "measure", us: Mapping[str, float] | None = None) -> TvmEngine:
    times = {} if us is None else us
    return TvmEngine(config(placement), services(folder, lambda program: Recorded(program, times)))
