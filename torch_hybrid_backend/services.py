"""Services that every engine is given besides the settings, ours and third parties' alike. Utility: imports core and utilities.

def engine(config: Config, services: Services) -> Engine:      # an EngineFactory; an entry point names one
    return Mine(services.store)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import Engine, RunProgram
from torch_hybrid_backend.measuring.measure import Timer
from torch_hybrid_backend.measuring.timing_cache import TimingCache
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.storage.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class Services:
    """The wiring makes one for the engines of equal settings.

    store: bytes on disk, for compiled kernels; one that goes with the process where `config.cache` is off. timings: on the same disk.
    run_program: a program as a function, run by the C++ plan. timer: of work on a device. progress: takes the title of a long task and how
    many steps it has; tells the user how far it is, where `config.progress` says so.
    """

    store: Store
    timings: TimingCache
    run_program: RunProgram
    timer: Callable[[Device], Timer]
    progress: Callable[[str, int], Progress]


EngineFactory = Callable[[Config, Services], Engine]
