"""Engines chosen anew when what a graph's regions are waiting for is built. Part of the wiring.

first call -> a plan without the regions that are `Pending`s
   ...        all of them are done: the next call's inputs are copied       NextCall, in the place of the plan for one call
   ...        the build thread chooses engines on the copies            AwaitingGraph.choose_anew

Where engines do not serve the sizes of the call that they were to be chosen on, that is done on the first call whose sizes all of them serve.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch_hybrid_backend.builds.background import Job, as_here, build_thread
from torch_hybrid_backend.core.engine import Pending
from torch_hybrid_backend.driver.stages import Compiled, Run
from torch_hybrid_backend.runtime.symbolic_executor import SizeRange, SymbolicExecutor


class AwaitingGraph(Protocol):
    """A graph whose engines can be chosen anew."""

    def __call__(self, inputs: list[Any]) -> list[Any]: ...

    def copied(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of a call for the build thread to keep."""
        ...

    def with_next_call(self, make: Callable[[Run], NextCall]) -> None:
        """Have the next call run what `make` makes of what runs calls now."""
        ...

    def without_next_call(self, sampling: NextCall) -> bool:
        """Undo that; False where another thread has."""
        ...

    def choose_anew(self, compiled: Compiled, inputs: Sequence[Any]) -> None:
        """Choose engines once more, on these inputs."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class NextCall:
    """Runs one call as before, and gives copies of its inputs to the build thread, which chooses engines anew on them. `ranges`: calls of other
    sizes just run."""

    graph: weakref.ref[AwaitingGraph]
    compiled: Compiled
    ranges: Sequence[SizeRange]
    run: Run

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        if isinstance(self.run, SymbolicExecutor) and not self.run.is_within(self.ranges, inputs):
            return self.run(inputs)
        graph = self.graph()
        assert graph is not None  # it is at work on this call
        kept = list(inputs)
        is_sample = graph.without_next_call(self)
        outputs = graph(list(inputs))
        if is_sample:
            copies, reference, compiled = graph.copied(kept), self.graph, self.compiled
            as_in_call = as_here(copies)

            def work() -> None:
                if (alive := reference()) is not None:
                    with as_in_call():
                        alive.choose_anew(compiled, copies)

            build_thread().submit(Job(work))
        return outputs


def choose_when_built(graph: AwaitingGraph, compiled: Compiled, pending: Sequence[Pending]) -> None:
    """Have engines chosen anew when all that is pending is built. It is cancelled when the graph is dropped, or at once where the graph cannot
    be tried unnoticed."""
    if not compiled.prepared.is_repeatable_apart:
        _cancel(pending)
        return
    unwanted = weakref.finalize(graph, _cancel, pending)
    unwanted.atexit = False
    reference, home, lock, left = weakref.ref(graph), build_thread(), threading.Lock(), len(pending)

    def one_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        unwanted.detach()  # it holds what was built
        if (alive := reference()) is not None:
            alive.with_next_call(functools.partial(NextCall, reference, compiled, ()))
        home.arrived()

    home.expect()
    for each in pending:
        each.when_done(one_done)


def choose_when_served(graph: AwaitingGraph, compiled: Compiled, run: Run, inputs: Sequence[Any]) -> None:
    """Have engines chosen anew, on a later call that all serve, if one does not serve the sizes of the call that they were chosen on.

    `run`: the executable's. What was compiled is held until then."""
    ranges = compiled.ranges
    if not ranges or not isinstance(run, SymbolicExecutor) or run.is_within(ranges, inputs):
        return
    if compiled.prepared.is_repeatable_apart:
        graph.with_next_call(functools.partial(NextCall, weakref.ref(graph), compiled, ranges))


def _cancel(pending: Sequence[Pending]) -> None:
    for each in pending:
        each.cancel()
