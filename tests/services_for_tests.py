"""Services of engines, as tests need them."""

from __future__ import annotations

from pathlib import Path

from torch_hybrid_backend.core.engine import RunProgram
from torch_hybrid_backend.measuring.measure import timer_for
from torch_hybrid_backend.measuring.timing_cache import TimingCache
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.runtime.program_runner import ProgramRunner
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.storage.store import Store


def services(folder: Path | None = None, run_program: RunProgram = ProgramRunner) -> Services:
    """On a store in `folder`, or in a temporary one; timings are those of one machine, whatever becomes of it."""
    store = Store.temporary() if folder is None else Store(folder)
    return Services(store, TimingCache(store, lambda device: f"machine {device}"), run_program, timer_for, Progress)
