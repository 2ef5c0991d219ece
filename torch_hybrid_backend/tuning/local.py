"""Tuning in this process, and what both ways of tuning are asked and tell."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid_backend.codegen.engine import TIMINGS
from torch_hybrid_backend.codegen.search import MIN_WORK
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.driver.session import open_services
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.tuning.claims import Claims, State
from torch_hybrid_backend.tuning.shared_tuner import SharedTuner, TunedModel

_NONE = (
    f"no kernel of this model has variants to time: kernels below {MIN_WORK:,.0f} multiply-adds and those with one variant are not tuned, and "
    "times that the cache has are not taken again"
)


@dataclass(frozen=True, slots=True)
class Request:
    """Model to tune: by the name of its factory and the folder that it is found in, under `config`, for `budget_s` seconds."""

    target: str
    folder: str
    config: Config
    budget_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Summary:
    """Outcome of tuning. `hosts`: how many machines timed. `notes`: sentences about what went wrong meanwhile."""

    state: State
    hosts: int
    seconds: float
    cache: Path
    is_settled: bool = True
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        state = self.state
        gain = f", {time_in_words(state.before_us)} to {time_in_words(state.now_us)}" if state.before_us else ""
        lines = [
            *self.notes,
            f"{state.faster} of {state.kernels} kernels faster{gain}"
            if state.kernels or not self.is_settled
            else _NONE,
            f"{state.tried} variants are timed ({self.hosts} machine{'s' * (self.hosts != 1)}, {self.seconds:.0f} s)",
        ]
        if state.left:
            lines.append(f"{state.left} variants are left: the same command goes on from here")
        lines.append(f"kept in {self.cache}")
        if not self.is_settled:
            lines.append("only times are kept: the next process compiles the fastest kernels")
        if state.is_disturbed:
            lines.append(
                "other load was felt: such times count when three runs have taken them (docs/guides/tuning.md)"
            )
        return "\n".join(lines)


def tune_here(request: Request, progress: Progress) -> Summary:
    """Tune a model in this process until nothing is left, the time is over, or Ctrl-C. Raises ConfigError for a factory that makes no model."""
    start = time.monotonic()
    services = open_services(request.config)
    claims = Claims(services.timings.entries(TIMINGS), request.budget_s)
    tuner = SharedTuner("here", claims, services.timings)
    settled = False
    try:
        model = TunedModel(Factory(request.target), request.config)
        model.tune(tuner, keeps=True)
        if not tuner.is_stopped:
            progress.at("the first call with the fastest kernels")
            model.settle(tuner, services.timings, claims.entries())
            settled = True
    except KeyboardInterrupt:
        progress.say("stopped")
    return Summary(claims.state(), 1, time.monotonic() - start, services.store.root, settled)
