"""A model to tune, and kernels whose times are the same in every process: their real ones depend on what else the machine does.

Kernels run as they are. Other load is not felt. The times depend on the kernel's name, which has its key.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import nn

from torch_hybrid_backend.core.program import OperatorCall
from torch_hybrid_backend.measuring import other_load
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

_real = ProgramRunner.kernel_us


def _kernel_us(runner: ProgramRunner, inputs: Sequence[torch.Tensor]) -> list[float]:
    assert all(us > 0 for us in _real(runner, inputs))
    names = [k.name if isinstance(k, OperatorCall) else k.symbol for k in runner._program.steps]  # type: ignore[union-attr]
    return [1000.0 + zlib.crc32(name.encode()) % 5000 for name in names]


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Two layers with work enough to be tuned."""
    ProgramRunner.kernel_us = _kernel_us  # type: ignore[method-assign]
    other_load.thread_waits = dict  # type: ignore[assignment]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 300), nn.ReLU(), nn.Linear(300, 200)).eval()
    return model, (torch.randn(64, 256),)


def broken() -> object:
    """Raise as a factory with a fault does."""
    raise FileNotFoundError("no weights here")
