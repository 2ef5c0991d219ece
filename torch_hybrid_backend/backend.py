"""The backend: the file that imports every stage and wires them together. Read it first.

torch.compile(model, backend="hybrid")
  -> capture      Dynamo's graph -> functional ATen graphs
  -> passes       fold, simplify; split off what depends on parameters alone (hoist)
  -> partition    regions and who may run them
  -> engines      regions -> compiled regions
  -> first call   every candidate checked against eager and priced (partition.placement), on the real inputs
  -> runtime      the winners as one C++ plan
  -> whole call   the plan priced against Dynamo's graph in eager (partition.whole_call)
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from torch_hybrid_backend.bisection import bisected_engines, bisected_passes, is_running
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.capture.cache.aot_cache import KeptGraphs
from torch_hybrid_backend.config import Config, apply_log_level
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import EAGER, CompiledRegion
from torch_hybrid_backend.core.plan import Plan, RegionDecision
from torch_hybrid_backend.core.region import Segment
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.eager_graph import EagerGraph
from torch_hybrid_backend.engines.deadline import compile_in_time
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.garbage import collector_paused, full_collections
from torch_hybrid_backend.graph.values import holds_collectives, is_repeatable
from torch_hybrid_backend.partition.capability import accepted
from torch_hybrid_backend.partition.fallback import demote, run_refusal
from torch_hybrid_backend.partition.known_graphs import KnownGraphs, graph_key
from torch_hybrid_backend.partition.placement import Pricing, choose, decide
from torch_hybrid_backend.partition.plan_builder import make_plan
from torch_hybrid_backend.partition.regions import Partition, partition
from torch_hybrid_backend.partition.whole_call import PricedCall
from torch_hybrid_backend.partition.wrapped_region import checked, reported
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.control_flow import compile_bodies
from torch_hybrid_backend.passes.hoist import Hoisted, hoist
from torch_hybrid_backend.passes.inline_subgraphs import inline_subgraphs
from torch_hybrid_backend.passes.pipeline import PASSES, run_passes
from torch_hybrid_backend.report import Explanation
from torch_hybrid_backend.runtime.constant_pool import MadeOnce
from torch_hybrid_backend.runtime.executor import CompiledSegment, build_executor
from torch_hybrid_backend.runtime.native.ops import give_back_freed_memory
from torch_hybrid_backend.runtime.plan_layout import StaticLayoutError
from torch_hybrid_backend.runtime.python_executor import PythonExecutor
from torch_hybrid_backend.runtime.python_executor import checked as checked_outputs
from torch_hybrid_backend.runtime.symbolic_executor import SymbolicExecutor
from torch_hybrid_backend.session import Session, open_session

log = logging.getLogger(__name__)

OnPlan = Callable[[Plan], None]


def hybrid(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend: compiles one graph; `torch.compile(model, backend="hybrid")` calls it.

    mode, options: as given to `torch.compile`; see `config.Config`. Raises ConfigError for unknown settings or values; no
    fault of an engine reaches the caller unless `strict` is set.
    """
    return compile_graph(gm, example_inputs, Config.from_env(os.environ).with_options(options, mode))


@collector_paused()
def compile_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], config: Config, on_plan: OnPlan | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph under `config`; `on_plan` gets each plan when it is made (in the graph's first call)."""
    apply_log_level(config)
    shared = open_session(config)
    deadline = Deadline(config.compile_deadline_s)
    devices = {CPU, *(Device.of(value.device) for value in example_inputs if isinstance(value, torch.Tensor))}
    key = graph_key(gm, example_inputs, f"{[shared.versions(device) for device in sorted(devices, key=str)]}")
    calls: list[PricedCall] = []

    @collector_paused()  # a backward graph may be compiled later, when backward is called
    def compile_captured(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        if not _is_priced_whole(captured, config):
            return HybridGraph(captured, shared, config, on_plan, deadline=deadline)
        sizes = [k for k, value in enumerate(example_inputs) if isinstance(value, int | torch.SymInt)]
        pricing = functools.partial(_pricing, shared, config, deadline, CPU)  # only calls on the host are priced whole
        call = PricedCall(gm.forward, key, sizes, config.measure_budget_s, pricing, on_plan)
        calls.append(call)
        return HybridGraph(captured, shared, config, call.take_plan, deadline=deadline)

    def compiled_whole() -> Callable[..., Any]:
        planned = capture(gm, example_inputs, compile_captured, keep_ops, kept)
        return calls[0].around(planned) if calls else planned

    keep_ops = frozenset[torch._ops.OpOverload]().union(*(engine.keep_ops for engine in shared.engines))
    kept = KeptGraphs(shared.services.store) if config.cache else None
    known = KnownGraphs(shared.services.store)
    if key in known:
        return compiled_whole()
    shared.prepare(len(gm.graph.nodes))  # what engines need to compile starts while AOTAutograd traces
    compiled = compiled_whole()
    known.add(key)
    return compiled


def _is_priced_whole(captured: CapturedGraph, config: Config) -> bool:
    """Whether whole calls of the graph can be timed, and are to be: not where nothing is timed, or all is compared with eager anyway."""
    if captured.kind != "inference" or captured.writes_inputs or is_running():
        return False
    if config.placement == "estimate" or config.verify == "always":
        return False
    graph = captured.graph_module.graph
    values = [value for node in graph.nodes for value in tree_leaves(node.meta.get("val"))]
    on_cpu = all(value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor))
    return on_cpu and is_repeatable(captured.graph_module)


def _pricing(session: Session, config: Config, deadline: Deadline, device: Device) -> Pricing:
    """What is needed to price work on a device of the machine as it is now: threads may have been set since the last graph."""
    timings = session.services.timings if config.cache else None
    return Pricing(timings, session.versions(device), device, deadline, session.services.timer(device))


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Explanation:
    """The plans of every graph that `model(*args, **kwargs)` compiles, in order.

    The model is compiled anew (earlier compilations of it stay valid) and called once, in the caller's grad mode; under grad mode
    only the forward graph is compiled by the call, as nothing calls backward. `options` and `dynamic` as for `torch.compile`: Dynamo
    makes sizes symbolic that it has seen vary, also in earlier compilations of the same code, unless `dynamic=False`. A model whose graphs
    hold collectives is explained by all ranks or by none: the call is a call. The result prints as text; `to_json()` and `to_html()` give
    the other forms.

        with torch.no_grad():
            print(torch_hybrid_backend.explain(model, x))
    """
    config = Config.from_env(os.environ).with_options(options, None)
    plans: list[Plan] = []
    # Dynamo recognises a compilation by its backend object: a new partial is a new compilation.
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)
    torch.compile(model, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return Explanation(tuple(plans))


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
    ) -> None:
        """`deadline`: for the kernels of this graph and of others that are compiled with it; None: of `config`, for this one."""
        start = time.perf_counter()
        self._name = name
        self._kind = captured.kind
        self._config = config
        self._session = session
        self._on_plan = on_plan
        self._deadline = deadline or Deadline(config.compile_deadline_s)
        inline_subgraphs(captured.graph_module)
        run_passes(captured.graph_module, PassContext.of(captured), bisected_passes(PASSES))
        # Sub-graphs are looked into, so before they are compiled.
        self._has_collectives = holds_collectives(captured.graph_module)
        compile_bodies(captured, self._compile_body)
        constants = captured.static_inputs if captured.kind == "inference" else frozenset[str]()
        self._hoisted: Hoisted = hoist(captured.graph_module, constants)
        self._fold = EagerGraph(self._hoisted.fold) if self._hoisted.fold is not None else None
        self._partition: Partition = partition(self._hoisted.main, bisected_engines(session.engines), config)
        self._candidates = self._compile()
        self._lock = threading.RLock()
        self._run: Callable[[Sequence[Any]], list[Any]] | None = None
        self._chosen: dict[str, CompiledRegion] = {}
        self._decisions: dict[str, RegionDecision] = {}
        self.plan: Plan | None = None
        segments = self._partition.graph.segments
        log.info("%s graph: %d segments compiled in %.2f s", self._kind, len(segments), time.perf_counter() - start)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        run = self._run
        if run is None:
            with self._lock:
                if self._run is None:
                    return self._first_call(inputs)
                run = self._run
        try:
            return run.run(inputs, self._guarded) if isinstance(run, PythonExecutor) else run(inputs)
        except HybridError as error:
            if self._config.strict or self._has_collectives:
                raise
            with self._lock:
                if self._run is run:
                    return self._recover(inputs, error)
        return self(inputs)  # another thread, which met the same fault, has put something else in its place

    def _compile_body(self, name: str, body: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        """A branch or loop body as a graph of its own, which eager runs where compiling it fails."""
        try:
            return HybridGraph(body, self._session, self._config, self._on_plan, f"{self._name}.{name}", self._deadline)
        except HybridError as error:
            if self._config.strict:
                raise
            log.warning("the sub-graph %s of a control flow operator runs in eager: %s", name, error)
            return EagerGraph(body.graph_module)

    def _compile(self) -> dict[str, dict[str, CompiledRegion | Refused | Exception]]:
        """Every candidate engine's compilation of every region, or why it does not accept it: region name -> engine name -> result."""
        names = [engine.name for engine in self._session.engines]
        segments = self._partition.graph.segments
        wanted = {s.region.name: self._partition.candidates(s, names) for s in segments}
        results: dict[str, dict[str, CompiledRegion | Refused | Exception]] = {s.region.name: {} for s in segments}
        for engine in self._session.engines:
            regions = []
            for region in (s.region for s in segments if engine.name in wanted[s.region.name]):
                verdict = accepted(engine, region, strict=self._config.strict)
                if isinstance(verdict, Refused):
                    results[region.name][engine.name] = verdict
                else:
                    regions.append(region)
            if not regions:
                continue
            with unset_fake_temporarily():  # AOTAutograd is still tracing: an engine's own tensors would be fake
                compiled = compile_in_time(engine, regions, self._deadline)
            for region, result in zip(regions, compiled, strict=True):
                results[region.name][engine.name] = result
        return results

    def _segments(self) -> list[CompiledSegment]:
        return [
            self._chosen.get(segment.region.name, segment.region.eager) for segment in self._partition.graph.segments
        ]

    def _titles(self) -> list[str]:
        """What a profiler shows for each segment: its name in the plan and who runs it."""

        def engine(name: str) -> str:
            if name in self._decisions:
                return self._decisions[name].engine
            return "placement" if self._candidates.get(name) else EAGER  # the first call tries them all

        names = (segment.region.name for segment in self._partition.graph.segments)
        return [f"hybrid::{name} {engine(name)}" for name in names]

    @full_collections.held()
    def _first_call(self, inputs: Sequence[Any]) -> list[Any]:
        start = time.perf_counter()
        pricing_on = functools.cache(functools.partial(_pricing, self._session, self._config, self._deadline))
        # Kept once all is chosen: an interrupted first call leaves nothing behind.
        chosen: dict[str, CompiledRegion] = {}
        decisions: dict[str, RegionDecision] = {}

        def place(_index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
            region = segment.region
            candidates = self._candidates[region.name]
            if not candidates:
                return region.eager(arguments)
            choice = choose(region, candidates, arguments, self._config, pricing_on(region.device))
            once.let_go()
            decisions[region.name] = choice.decision
            if choice.compiled is not None:
                chosen[region.name] = self._checked(segment, choice.decision.engine, choice.compiled)
            return choice.outputs

        with MadeOnce() as once:
            outputs = self._python_executor().run(inputs, place)
            self._chosen, self._decisions = chosen, decisions
            run = self._python_executor() if self._has_collectives else self._whole(inputs)
            self._tell()
            self._run = run  # last: interrupted before, the next call is a first call again
        self._candidates = {}  # what was not chosen is not needed any more
        if self._chosen:  # else nothing was packed, and the C++ runtime may not even be there
            give_back_freed_memory()
        log.info("%s graph: engines chosen in %.2f s", self._kind, time.perf_counter() - start)
        return outputs

    def _checked(self, segment: Segment, engine: str, compiled: CompiledRegion) -> CompiledRegion:
        if self._config.verify != "always":
            return compiled if compiled.program is not None else reported(compiled)
        return checked(segment.region, engine, compiled, strict=self._config.strict)

    def _python_executor(self) -> PythonExecutor:
        return PythonExecutor(self._partition.graph, self._segments(), self._hoisted.inputs, self._fold, self._titles())

    def _whole(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """The fast path: one C++ plan of the choices made, with the constants of a call's inputs. From Python where that cannot be."""
        segments = self._segments()
        build = build_executor if self._partition.graph.is_static else SymbolicExecutor
        try:
            run = build(self._partition.graph, segments, self._hoisted.inputs, self._fold, self._titles())
            run.bind(inputs)
        except StaticLayoutError as error:
            log.info("this graph runs from Python, segment by segment: %s", error)
            return self._python_executor()
        except HybridError as error:
            if self._config.strict:
                raise
            log.warning("this graph runs from Python, segment by segment: %s", error)
            return self._python_executor()
        for compiled in self._chosen.values():
            compiled.release()  # the plan keeps packed constants of its own, or shares these
        return run

    def _tell(self) -> None:
        """Make the plan that tells of the choices."""
        self.plan = make_plan(self._name, self._kind, self._partition, list(self._decisions.values()))
        if self._on_plan is not None:
            self._on_plan(self.plan)

    def _recover(self, inputs: Sequence[Any], error: HybridError) -> list[Any]:
        """A call failed: run it segment by segment, give to eager what fails, and build the fast path anew."""
        chosen = set(self._chosen)
        outputs = self._python_executor().run(inputs, self._guarded)
        if chosen != set(self._chosen):
            self._run = self._whole(inputs)
        else:
            # Every segment ran: the fault was in the plan around them. Stay in Python rather than fail again.
            log.warning("this graph runs from Python, segment by segment, from now on: %s", error)
            self._run = self._python_executor()
        return outputs

    def _guarded(self, _index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
        """One segment's results; a region that fails goes to eager, in this call and from then on."""
        region = segment.region
        compiled = self._chosen.get(region.name)
        if compiled is not None:
            try:
                return checked_outputs(segment, compiled(arguments))
            except Exception as cause:  # whatever a compiled region raises, eager is there for it
                self._give_to_eager(segment, cause)
        return region.eager(arguments)

    def _give_to_eager(self, segment: Segment, cause: Exception) -> None:
        region = segment.region
        with self._lock:
            if region.name not in self._chosen:
                return  # another thread met the same fault
            before = self._decisions[region.name]
            refusal = demote(region, before.engine, run_refusal(cause), strict=self._config.strict, cause=cause)
            del self._chosen[region.name]
            self._decisions[region.name] = decide(
                region, EAGER, None, before.costs, (*before.refusals, refusal), before.max_error
            )
            self._tell()
