"""The line that says what became of a graph, once its first call is over, and the progress of that call. Part of the wiring.

    hybrid: ResNetForImageClassification ready in 9.2 s: 2.3x eager (tvm runs 123 of 123 operators)

The line is logged at INFO by the logger of this module. A terminal shows it where the program has not configured logging.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.report.share import DISTURBED, shares

log = logging.getLogger(__name__)

_DELAY_S = 2.0  # shorter first calls show no progress


class Ready:
    """Messages about one graph: its progress while it is compiled and in its first call, then one line."""

    def __init__(self, title: str, config: Config) -> None:
        self.title = title
        self._shown = config.progress
        self._spent_s = 0.0
        self._is_working = False
        self._plan: Plan | None = None
        self._is_told = False
        if config.progress and not config.log:
            _show_on_terminal()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Show progress, and count the seconds, while the graph is worked on; what is entered within counts once."""
        if self._is_working or self._is_told:
            yield
            return
        self._is_working = True
        start = time.perf_counter()
        try:
            with Progress(f"hybrid: {self.title}", shown=self._shown, delay_s=_DELAY_S, spent_s=self._spent_s):
                yield
        finally:
            self._spent_s += time.perf_counter() - start
            self._is_working = False
        if self._plan is not None:  # the first time alone; what changes later is told where it does
            self._is_told = True
            log.info("%s", in_words(self.title, self._plan, self._spent_s))

    def telling(self, on_plan: Callable[[Plan], None] | None = None) -> Callable[[Plan], None]:
        """Function that takes the graph's plan: it is kept for the line that is told when the work is over, and handed on to `on_plan`."""

        def take_plan(plan: Plan) -> None:
            self._plan = plan
            if on_plan is not None:
                on_plan(plan)

        return take_plan


def in_words(title: str, plan: Plan, seconds: float) -> str:
    """The line: how long it took, what is gained where whole calls were timed, and who runs how many operators."""
    training = "" if plan.kind == "inference" else f" (training, {plan.kind})"
    runs = ", ".join(f"{share.engine} runs {share.operators}" for share in shares(plan) if share.engine != EAGER)
    who = f"{runs} of {len(plan.nodes)} operators" if runs else "eager runs all operators"
    gain = who
    if plan.call is not None and plan.call.costs:
        times = {cost.engine: cost.microseconds for cost in plan.call.costs}
        planned, eager = times["plan"], times[EAGER]
        load = f"; {DISTURBED}" if plan.call.costs[0].kind == "disturbed" else ""
        if plan.call.engine == EAGER:
            gain = f"eager keeps the call: it takes {time_in_words(eager)}, the plan {time_in_words(planned)}{load}"
        else:
            gain = f"{eager / planned:.2g}x eager ({who}{load})" if planned else who
    return f"hybrid: {title}{training} ready in {seconds:.1f} s: {gain}"


def _show_on_terminal() -> None:
    """Have the line shown where standard error is a terminal and the program has not configured logging."""
    if log.hasHandlers() or log.level or not (sys.stderr and sys.stderr.isatty()):
        return
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False
