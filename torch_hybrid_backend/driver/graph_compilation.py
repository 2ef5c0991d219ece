"""GraphCompilation: one graph of Dynamo's, from its capture to what Dynamo calls in its place. Part of the wiring.

capture            AOTAutograd makes ATen graphs of it: one for inference, or a forward and a backward graph
compile_captured   each becomes a `HybridGraph`; the backward graph may do so later, in the first call of backward
whole              the calls of all of it: priced against eager, made off the call, raising what eager would raise
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.builds.background import InBackground, as_here, copies_of
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.capture.cache.aot_cache import AotCache
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.precision import AS_WRITTEN
from torch_hybrid_backend.driver.bisection import applied_in_capture, is_running
from torch_hybrid_backend.driver.errors_as_written import as_written, raising_as_written
from torch_hybrid_backend.driver.garbage import collector_paused
from torch_hybrid_backend.driver.head_start import program_key
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph, OnPlan, OnRegions, pricing_of
from torch_hybrid_backend.driver.prepared import copy_of, hindrance
from torch_hybrid_backend.driver.profiling import PlannedGraph, Timeable, WholeGraph
from torch_hybrid_backend.driver.ready import Ready
from torch_hybrid_backend.driver.session import Session
from torch_hybrid_backend.graph.devices import is_on_host
from torch_hybrid_backend.graph.eager_graph import EagerGraph, with_right_text
from torch_hybrid_backend.graph.values import holds_collectives, is_repeatable
from torch_hybrid_backend.partition.seen_graphs import SeenGraphs, graph_key
from torch_hybrid_backend.partition.training_call import PricedTraining
from torch_hybrid_backend.partition.whole_call import PricedCall
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.runtime.native.row_writes import write_rows
from torch_hybrid_backend.torch_private import OpOverload, hint_of, tracing

log = logging.getLogger(__name__)

BoxedCall = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks for what a compilation makes: each plan when it is made (in the graph's first call), the compiled regions of a plan, what is
    built off the call, and what can be timed."""

    on_plan: OnPlan | None = None
    on_regions: OnRegions | None = None
    on_background: Callable[[InBackground], None] | None = None
    on_graph: Callable[[Timeable], None] = lambda _: None


class GraphCompilation:
    """The compilation of one graph of Dynamo's. `compiled` is called once; AOTAutograd keeps the object for the backward graph."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        config: Config,
        session: Session,
        ready: Ready,
        listeners: Listeners,
    ) -> None:
        self._gm = gm
        self._config = config
        self._session = session
        self._ready = ready
        self._listeners = listeners
        self._deadline = Deadline(config.compile_deadline_s)
        self._in_eager = with_right_text(gm)
        devices = {CPU, *(Device.of(value.device) for value in example_inputs if isinstance(value, torch.Tensor))}
        versions = [session.versions(device) for device in sorted(devices, key=str)]
        self._key = graph_key(gm, example_inputs, f"{config.precision} {config.weight_form} {versions}")
        self._sizes = [k for k, value in enumerate(example_inputs) if isinstance(value, int | torch.SymInt)]
        self._off_the_call = OffTheCall(config.strict, listeners.on_background)
        self._runs_twice = True  # unnoticed, each graph but the backward graph
        self._writes_inputs = False
        self._priced: tuple[PricedCall, bool] | None = None  # with whether it is built off the call
        self._priced_training: PricedTraining | None = None
        self._graphs: weakref.WeakSet[HybridGraph] = weakref.WeakSet()  # a plan that loses is freed

    def compiled(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph; return what Dynamo calls in its place."""
        known = SeenGraphs(self._session.services.store)
        if self._key in known:
            return self._whole(self._capture(example_inputs))
        # What engines need to compile starts while AOTAutograd traces.
        self._session.prepare(len(self._gm.graph.nodes))
        whole = self._whole(self._capture(example_inputs))
        known.add(self._key)
        known.add(program_key())
        return whole

    def try_call(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> None:
        """Make the first call of what `compiled` returned, on copies of inputs, if that can be done unnoticed."""
        if not self._runs_twice:
            log.info("a graph that cannot be run twice unnoticed is not tried when it is compiled")
            return
        sizes = [hint_of(value) if isinstance(value, torch.SymInt) else value for value in inputs]
        copies = copies_of(sizes, (lambda *_: False) if self._writes_inputs else _is_static)
        with tracing(None), as_here(copies)():
            compiled(*copies)

    def _capture(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Have AOTAutograd make ATen graphs of the graph, and call `_compile_captured` with each."""
        keep_ops = frozenset[OpOverload]().union(*(engine.keep_ops for engine in self._session.engines))
        kept = AotCache(self._session.services.store) if self._config.cache and not is_running() else None
        with Progress("tracing"):
            return capture(
                self._gm, example_inputs, self._compile_captured, keep_ops, kept, applied_in_capture(), write_rows
            )

    @collector_paused()  # a backward graph may be compiled later, when backward is called
    def _compile_captured(self, captured: CapturedGraph) -> BoxedCall:
        """Compile one ATen graph."""
        if captured.kind == "forward" and self._config.precision != AS_WRITTEN:
            warn_once(
                f"precision={self._config.precision} is for inference: graphs for training are computed as written"
            )
        in_background = self._is_built_in_background(captured)
        if captured.kind != "backward":
            self._runs_twice &= hindrance(captured.graph_module) is None
            self._writes_inputs |= captured.writes_inputs
        ready = Ready(self._ready.title, self._config) if captured.kind == "backward" else self._ready
        on_plan = ready.telling(self._listeners.on_plan)
        if is_priced_whole(captured, self._config):
            on_plan = self._price_whole(on_plan, ready, in_background)
            return self._hybrid_graph(captured, ready, on_plan, in_background)
        if not in_background:
            on_plan = self._price_training(captured, on_plan, ready)
            return self._hybrid_graph(captured, ready, on_plan, in_background)
        written = EagerGraph(copy_of(captured.graph_module))  # before passes change it
        graph = self._hybrid_graph(captured, ready, on_plan, in_background)
        return self._off_the_call.graph(f"a {captured.kind} graph", written, graph)

    def _is_built_in_background(self, captured: CapturedGraph) -> bool:
        why_not = _not_off_the_call(captured) if self._config.background else ""
        if why_not:
            log.warning("a graph is compiled in its call, not in the background: %s", why_not)
        return self._config.background and not why_not

    def _hybrid_graph(self, captured: CapturedGraph, ready: Ready, on_plan: OnPlan, in_background: bool) -> HybridGraph:
        def on_graph(graph: HybridGraph) -> None:
            self._graphs.add(graph)
            self._listeners.on_graph(PlannedGraph(graph))

        return HybridGraph(
            captured,
            self._session,
            self._config,
            on_plan,
            self._ready.title,
            self._deadline,
            self._listeners.on_regions,
            meanwhile=self._off_the_call.graph if in_background else None,
            working=ready.working,
            on_graph=on_graph,
        )

    def _price_whole(self, on_plan: OnPlan, ready: Ready, in_background: bool) -> OnPlan:
        """Have whole calls priced against eager; return what takes the plan."""
        # Only calls on the host are priced whole.
        pricing = functools.partial(pricing_of, self._session, self._config, self._deadline, CPU)
        nodes = None if self._config.verify == "off" else as_written(self._gm)
        call = PricedCall(
            self._in_eager.forward,
            nodes,
            self._key,
            self._sizes,
            self._config.measure_budget_s,
            pricing,
            on_plan,
            functools.partial(self._pricing_calls, ready),
        )
        self._priced = call, in_background
        self._listeners.on_graph(WholeGraph(call, self._in_eager))
        return call.take_plan

    def _price_training(self, captured: CapturedGraph, on_plan: OnPlan, ready: Ready) -> OnPlan:
        """Have steps of training priced against eager, where they can be; return what takes the plan of a forward or a backward graph."""
        if captured.kind == "forward" and not self._sizes and is_timed(captured, self._config):
            pricing = functools.partial(pricing_of, self._session, self._config, self._deadline, CPU)
            is_shared = (lambda *_: False) if captured.writes_inputs else _is_static
            self._priced_training = PricedTraining(
                self._in_eager.forward,
                lambda inputs: copies_of(inputs, is_shared),
                self._key,
                self._config.measure_budget_s,
                pricing,
                functools.partial(self._pricing_calls, ready),
            )
        priced = self._priced_training
        # With a backward graph that cannot be run twice unnoticed there is never a second plan, and nothing is timed.
        if priced is None or captured.kind == "inference" or hindrance(captured.graph_module) is not None:
            return on_plan
        return priced.taking(on_plan)

    @contextlib.contextmanager
    def _pricing_calls(self, ready: Ready) -> Iterator[None]:
        """Work on a graph whose whole calls, or steps of training, are priced: eager's calls leave free memory behind, of ResNet-50 61 MiB."""
        with ready.working():
            yield
            for graph in tuple(self._graphs):
                graph.give_back_memory()

    def _whole(self, planned: Callable[..., Any]) -> Callable[..., Any]:
        """The calls of the graph, with what stands around those of its ATen graphs."""
        if self._runs_twice:
            planned = raising_as_written(planned, self._gm)
        if self._priced_training is not None:
            return self._priced_training.around(planned)
        if self._priced is None:
            return planned
        priced, in_background = self._priced
        call = priced.around(planned)
        if not in_background:
            return call
        return self._off_the_call.call(
            "a graph",
            self._in_eager.forward,
            call,
            priced.waits,
            lambda *inputs: copies_of(inputs, _is_static),
            once=not self._sizes,
        )


@dataclass(frozen=True, slots=True)
class OffTheCall:
    """Puts eager in the place of graphs that the build thread compiles. `on_background` gets each."""

    strict: bool
    on_background: Callable[[InBackground], None] | None

    def graph(self, title: str, eager: EagerGraph, graph: HybridGraph) -> BoxedCall:
        """Calls of a graph, which run in eager until it is ready."""
        return self.call(
            title, _without_grad(eager), graph, lambda _: not graph.is_ready, lambda inputs: [graph.copied(inputs)]
        )

    def call(
        self,
        title: str,
        eager: Callable[..., Any],
        planned: Callable[..., Any],
        waits: Callable[..., bool],
        copied: Callable[..., Sequence[Any]],
        *,
        once: bool = True,
    ) -> Callable[..., Any]:
        """Calls that run in eager while `waits` says so; see `InBackground`."""
        in_background = InBackground(title, eager, planned, waits, copied, once=once, strict=self.strict)
        if self.on_background is not None:
            self.on_background(in_background)
        return in_background.call


def _not_off_the_call(captured: CapturedGraph) -> str:
    """The reason why a graph cannot be tried on copies of its inputs while calls go on; "" where it can."""
    module = captured.graph_module
    if is_running():
        return "PyTorch's compiler bisector runs"
    if holds_collectives(module):
        return "it works with other processes, and all of them have to do the same in each call"
    if (node := hindrance(module)) is not None:
        return f"it calls {node.target}, which may do more than compute: it cannot be run twice unnoticed"
    if not is_on_host(captured.graph_module):
        return "it runs on a GPU, where building beside calls was never tried"
    return ""


def _without_grad(graph: EagerGraph) -> BoxedCall:
    def run(inputs: list[Any]) -> list[Any]:
        with torch.no_grad():
            return graph(inputs)

    return run


def _is_static(_position: int, value: object) -> bool:
    """True if Dynamo takes a tensor for one that keeps its memory: a parameter or a buffer."""
    return isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None


def is_priced_whole(captured: CapturedGraph, config: Config) -> bool:
    """True if whole calls of the graph can be timed, and are to be: inference graphs that do nothing but compute."""
    if captured.kind != "inference" or captured.writes_inputs:
        return False
    return is_timed(captured, config) and is_repeatable(captured.graph_module)


def is_timed(captured: CapturedGraph, config: Config) -> bool:
    """True if calls of graphs are to be timed: not where nothing is timed, or all is compared with eager anyway; only on the host."""
    is_off = is_running() or config.placement == "estimate" or config.verify == "always"
    return not is_off and is_on_host(captured.graph_module)


@functools.cache
def warn_once(text: str) -> None:
    """Log a WARNING once in a process: it is the same for all graphs of a program."""
    log.warning("%s", text)
