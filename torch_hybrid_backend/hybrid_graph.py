"""HybridGraph: one captured graph from its compilation to its calls, through the stages of `stages`. Part of the wiring."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.region import Region, Segment
from torch_hybrid_backend.eager_graph import EagerGraph
from torch_hybrid_backend.errors import HybridError, is_sticky
from torch_hybrid_backend.garbage import full_collections
from torch_hybrid_backend.generators import is_captured
from torch_hybrid_backend.model_gate import judged
from torch_hybrid_backend.partition.placement import Pricing
from torch_hybrid_backend.partition.reference import replay_of
from torch_hybrid_backend.runtime.constant_pool import ConstantPool
from torch_hybrid_backend.runtime.native.ops import give_back_freed_memory
from torch_hybrid_backend.runtime.python_executor import PythonExecutor, checked
from torch_hybrid_backend.session import Session
from torch_hybrid_backend.speed_gate import as_known, fastest
from torch_hybrid_backend.stages import Compiled, Installed, Placed, Prepared, compile_graph, install, place, prepare

log = logging.getLogger(__name__)

OnPlan = Callable[[Plan], None]
# Gets the regions of a plan that engines run, by name and in order.
OnRegions = Callable[[Mapping[str, CompiledRegion]], None]


class HybridGraph:
    """One captured graph. The first call chooses engines on the real inputs; later calls run the resulting plan.

    Takes the graph's inputs as a list and returns its outputs as a list. Threads may call it at once.

    A graph with collectives never runs anything twice: the other ranks would not take part. It runs segment by segment from Python,
    where a region that fails is run by eager in that very call, and no other segment again.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        session: Session,
        config: Config,
        on_plan: OnPlan | None = None,
        name: str = "graph",
        deadline: Deadline | None = None,
        on_regions: OnRegions | None = None,
    ) -> None:
        """`deadline`: for the kernels of this graph and of others that are compiled with it; None: of `config`, for this one."""
        start = time.perf_counter()
        self._name = name
        self._config = config
        self._session = session
        self._on_plan = on_plan
        self._on_regions = on_regions
        self._deadline = deadline or Deadline(config.compile_deadline_s)
        self._lock = threading.RLock()
        prepared = as_known(prepare(captured, name, config, self._compile_body), config, self._pricing())
        # Replaced as a whole: whoever is interrupted, or comes from another thread, finds one stage or the next.
        self._state: Compiled | Installed = self._compiled(prepared)
        log.info("%s graph: compiled in %.2f s", captured.kind, time.perf_counter() - start)

    @property
    def plan(self) -> Plan | None:
        """The decisions; None before the first call."""
        return self._state.plan if isinstance(self._state, Installed) else None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        state = self._state
        if isinstance(state, Compiled):
            with self._lock:
                if self._state is state:
                    return self._first_call(state, inputs)
            return self(inputs)  # another thread made the first call
        run = state.run
        try:
            return run.run(inputs, self._guarded) if isinstance(run, PythonExecutor) else run(inputs)
        except HybridError as error:
            if self._config.strict or state.placed.prepared.has_collectives or is_sticky(error):
                raise
            with self._lock:
                if self._installed().run is run:
                    return self._recover(inputs, error)
        return self(inputs)  # another thread, which met the same fault, has put something else in its place

    @full_collections.held()
    def _first_call(self, compiled: Compiled, inputs: Sequence[Any]) -> list[Any]:
        start = time.perf_counter()

        def place_anew(anew: Prepared) -> tuple[Placed, list[Any]]:
            return self._placed(self._compiled(anew), inputs)

        with ConstantPool():
            placed, outputs = self._placed(compiled, inputs)
            placed, outputs = fastest(placed, outputs, inputs, self._config, self._pricing(), place_anew)
            placed, outputs = judged(placed, outputs, inputs, self._config, place_anew)
            installed = install(placed, inputs, self._config)
            self._tell(installed, placed)
            self._state = installed  # last: interrupted before, the next call is a first call again
        if placed.compiled:  # else nothing was packed, and the C++ runtime may not even be there
            give_back_freed_memory()
        log.info("%s graph: engines chosen in %.2f s", placed.prepared.kind, time.perf_counter() - start)
        return outputs

    def _compiled(self, prepared: Prepared) -> Compiled:
        return compile_graph(prepared, self._session, self._config, self._pricing())

    def _placed(self, compiled: Compiled, inputs: Sequence[Any]) -> tuple[Placed, list[Any]]:
        return place(compiled, inputs, self._config, self._pricing())

    def _tell(self, decided: Placed | Installed, placed: Placed) -> None:
        if self._on_plan is not None:
            self._on_plan(decided.plan)
        if self._on_regions is not None:
            self._on_regions(placed.compiled)

    def _recover(self, inputs: Sequence[Any], error: HybridError) -> list[Any]:
        """A call failed: run it segment by segment, give to eager what fails, and build the fast path anew."""
        before = self._installed().placed
        outputs = before.python_executor().run(inputs, self._guarded)
        after = self._installed().placed
        if after is before:
            # Every segment ran: the fault was in the plan around them. Stay in Python rather than fail again.
            log.warning("this graph runs from Python, segment by segment, from now on: %s", error)
            self._state = Installed(before, before.python_executor())
        else:
            self._state = install(after, inputs, self._config)
        return outputs

    def _guarded(self, _index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
        """One segment's results; a region that fails goes to eager, in this call and from then on."""
        region = segment.region
        compiled = self._installed().placed.compiled.get(region.name)
        if compiled is not None and not (region.draws and is_captured(region.device)):
            replay = replay_of(region)
            try:
                return checked(segment, compiled(arguments))
            except Exception as cause:  # whatever a compiled region raises, eager is there for it
                self._give_to_eager(segment.region, cause)
                replay.rewind()
        return region.eager(arguments)

    def _give_to_eager(self, region: Region, cause: Exception) -> None:
        with self._lock:
            installed = self._installed()
            if region.name not in installed.placed.compiled:
                return  # another thread met the same fault
            placed = installed.placed.without(region, cause, strict=self._config.strict)
            self._state = Installed(placed, installed.run)
            self._tell(placed, placed)

    def _installed(self) -> Installed:
        assert isinstance(self._state, Installed)
        return self._state

    def _pricing(self) -> Callable[[Device], Pricing]:
        return functools.cache(functools.partial(pricing_of, self._session, self._config, self._deadline))

    def _compile_body(self, name: str, body: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        """A branch or loop body as a graph of its own, which eager runs where compiling it fails."""
        try:
            title = f"{self._name}.{name}"
            return HybridGraph(
                body, self._session, self._config, self._on_plan, title, self._deadline, self._on_regions
            )
        except HybridError as error:
            if self._config.strict:
                raise
            log.warning("the sub-graph %s of a control flow operator runs in eager: %s", name, error)
            return EagerGraph(body.graph_module)


def pricing_of(session: Session, config: Config, deadline: Deadline, device: Device) -> Pricing:
    """What is needed to price work on a device of the machine as it is now: threads may have been set since the last graph."""
    timings = session.services.timings if config.cache else None
    return Pricing(timings, session.versions(device), device, deadline, session.services.timer(device))
