"""The stages of one captured graph, each a frozen value made from the one before. Part of the wiring, as `backend` is.

CapturedGraph --prepare----------> Prepared      after the passes (`prepared`)
              --partition--------> Partitioned   its partitionings: cut into regions in the ways that are worth pricing
              --compile_regions--> Compiled      every region of them compiled by each engine that may run it; nothing has run
              --place------------> Assignment    one partitioning, and the engine of each of its regions: tried on the first call's inputs
              --build_executable-> Executable    one C++ plan of the choices made, or the same from Python
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.cancellation import check
from torch_hybrid_backend.capture.decompositions import decomposed
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import EAGER, CompiledRegion, Pending, PendingRegion
from torch_hybrid_backend.core.plan import Cost, Plan, Refusal, RegionDecision
from torch_hybrid_backend.core.region import Region, Segment
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.driver.agreed import choose_alike
from torch_hybrid_backend.driver.bisection import bisected_engines, is_running
from torch_hybrid_backend.driver.prepared import Prepared
from torch_hybrid_backend.driver.session import Session
from torch_hybrid_backend.engines.deadline import compile_in_time
from torch_hybrid_backend.errors import HybridError, failures, is_sticky, tells_of_later
from torch_hybrid_backend.generators import apart
from torch_hybrid_backend.measuring.measure import Rounds, measure
from torch_hybrid_backend.measuring.other_load import OtherLoad
from torch_hybrid_backend.partition.boundary import callbacks_us
from torch_hybrid_backend.partition.capability import accepted
from torch_hybrid_backend.partition.fallback import demote, run_refusal
from torch_hybrid_backend.partition.partitionings import Partitioning, partitionings
from torch_hybrid_backend.partition.placement import Choice, Pricing, choose, decide, timing_key
from torch_hybrid_backend.partition.plan_builder import make_plan
from torch_hybrid_backend.partition.regions import Partition
from torch_hybrid_backend.partition.wrapped_region import checked, reported
from torch_hybrid_backend.passes.decompose import decompose
from torch_hybrid_backend.progress import Progress, stepping
from torch_hybrid_backend.ranks.agreement import Agreement
from torch_hybrid_backend.runtime.constant_pool import release_unused
from torch_hybrid_backend.runtime.executor import CompiledSegment, Executor, build_executor
from torch_hybrid_backend.runtime.operator_program import NotNativeError, operator_region
from torch_hybrid_backend.runtime.plan_layout import StaticLayoutError
from torch_hybrid_backend.runtime.python_executor import PythonExecutor
from torch_hybrid_backend.runtime.symbolic_executor import SizeRange, SymbolicExecutor
from torch_hybrid_backend.torch_private import unset_fake_temporarily

log = logging.getLogger(__name__)

PARTITIONING_TIMINGS = "partitionings"  # their kind in the cache of timings

Run = Callable[[Sequence[Any]], list[Any]]
PricingOn = Callable[[Device], Pricing]
TimedRun = Executor | SymbolicExecutor | PythonExecutor
# An engine's compilation of a region, done or under way, why it does not accept it, or what stopped it.
Candidate = CompiledRegion | PendingRegion | Refused | Exception


@dataclass(frozen=True, slots=True, eq=False)
class CompiledPartitioning:
    """A partition, and of each region by name what the engines made of it, by name."""

    partitioning: Partitioning
    candidates: Mapping[str, Mapping[str, Candidate]]

    @property
    def order(self) -> str:
        """Name of the partitioning in the plan."""
        return ", ".join(self.partitioning.order)


@dataclass(frozen=True, slots=True, eq=False)
class Partitioned:
    """The partitionings that are to be priced, the cheapest by estimate first. `timing_key`: what their costs are kept under, "" for a single
    one; `kept`: costs that are known of earlier processes."""

    prepared: Prepared
    partitionings: tuple[Partitioning, ...]
    timing_key: str = ""
    kept: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The same with their regions compiled."""

    prepared: Prepared
    partitionings: tuple[CompiledPartitioning, ...]
    timing_key: str = ""
    kept: Mapping[str, float] = field(default_factory=dict)

    @property
    def pending(self) -> list[PendingRegion]:
        """The regions that are still being built elsewhere, each once."""
        candidates = (
            c for partitioning in self.partitionings for some in partitioning.candidates.values() for c in some.values()
        )
        return list({id(c): c for c in candidates if isinstance(c, PendingRegion) and not c.done}.values())

    @property
    def is_partial(self) -> bool:
        """True if something is missing that another process may have: what is timed without it tells of this process alone."""
        candidates = (
            made
            for partitioning in self.partitionings
            for some in partitioning.candidates.values()
            for made in some.values()
        )
        return any(isinstance(made, Exception) and not tells_of_later(made) for made in candidates)

    @property
    def ranges(self) -> tuple[SizeRange, ...]:
        """Size ranges that every compiled candidate supports; empty if all sizes are supported."""
        candidates = (
            _ready(c)
            for partitioning in self.partitionings
            for some in partitioning.candidates.values()
            for c in some.values()
        )
        programs = [made.program for made in candidates if isinstance(made, CompiledRegion)]
        return tuple(dict.fromkeys(each for program in programs if program is not None for each in program.ranges))


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Engine of each region. `compiled`: by region name, of the regions that an engine runs. `partitionings`: the cost of each priced
    partitioning. `begun`: builds elsewhere that regions which were tried have begun. `is_partial`: as of what was compiled."""

    prepared: Prepared
    partition: Partition
    compiled: Mapping[str, CompiledRegion]
    decisions: Mapping[str, RegionDecision]
    partitionings: tuple[Cost, ...] = ()
    begun: tuple[Pending, ...] = ()
    is_partial: bool = False

    @property
    def plan(self) -> Plan:
        """The decisions, for reports."""
        plan = make_plan(self.prepared.name, self.prepared.kind, self.partition, list(self.decisions.values()))
        return dataclasses.replace(
            plan,
            partitionings=self.partitionings,
            conversion=self.prepared.conversion,
            unrepeatable=self.prepared.unrepeatable,
        )

    def without(self, region: Region, cause: Exception, *, strict: bool) -> Assignment:
        """The same with eager in place of the engine whose compiled region raised `cause`. Raises RegionError under `strict`."""
        before = self.decisions[region.name]
        refusal = demote(region, before.engine, run_refusal(cause), strict=strict, cause=cause)
        after = decide(region, EAGER, None, before.costs, (*before.refusals, refusal), before.max_error)
        compiled = {name: made for name, made in self.compiled.items() if name != region.name}
        return dataclasses.replace(self, compiled=compiled, decisions={**self.decisions, region.name: after})

    def in_eager(self, refused: Refused) -> Assignment:
        """The same with eager for every region."""
        decisions = {}
        for name, before in self.decisions.items():
            refusals = before.refusals
            if before.engine != EAGER:
                refusals = (*refusals, Refusal.of(before.engine, refused))
            region = next(s.region for s in self.partition.graph.segments if s.region.name == name)
            decisions[name] = decide(region, EAGER, None, before.costs, refusals, before.max_error)
        return dataclasses.replace(self, compiled={}, decisions=decisions)

    @property
    def runs(self) -> list[CompiledSegment]:
        """Callables that run the segments, in order."""
        return [self.compiled.get(s.region.name, s.region.eager) for s in self.partition.graph.segments]

    @property
    def titles(self) -> list[str]:
        """Titles that a profiler shows for the segments."""
        return _titles(self.partition, {name: decision.engine for name, decision in self.decisions.items()})

    def python_executor(self) -> PythonExecutor:
        """The plan run from Python, segment by segment."""
        prepared = self.prepared
        return PythonExecutor(self.partition.graph, self.runs, prepared.hoisted.inputs, prepared.fold, self.titles)

    def eager_executor(self) -> PythonExecutor:
        """The same with eager for every segment."""
        prepared, graph = self.prepared, self.partition.graph
        runs = [segment.region.eager for segment in graph.segments]
        return PythonExecutor(graph, runs, prepared.hoisted.inputs, prepared.fold, _titles(self.partition, {}))


# Compiles a graph, and places it on the inputs of the call: with it the call's outputs.
Place = Callable[[Prepared], tuple[Assignment, list[Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """The runner of every call."""

    assignment: Assignment
    run: Run | PythonExecutor

    @property
    def executor(self) -> TimedRun | None:
        """The runner of the plan, under what stands in for it in some calls; None if it has none."""
        run: Any = self.run
        while not isinstance(run, TimedRun):
            run = getattr(run, "run", None) or getattr(run, "plan", None)
            if run is None:
                return None
        return run

    @property
    def plan(self) -> Plan:
        """The decisions, for reports, with what runs them."""
        graphs = self.run.cuda_graphs if isinstance(self.run, Executor | SymbolicExecutor) else ()
        return dataclasses.replace(self.assignment.plan, cuda_graphs=graphs)


def partition(prepared: Prepared, session: Session, config: Config, pricing_on: PricingOn) -> Partitioned:
    """Partition the graph, in every way that is worth pricing.

    Only the cheapest partitioning is left where an earlier process has priced them, where nothing is to be timed, and where the graph cannot be
    run more than once unnoticed.
    """
    engines = bisected_engines(session.engines)
    parts = functools.cache(decomposed)
    candidates = partitionings(
        prepared.hoisted.main,
        engines,
        config,
        lambda node, engine: parts(node, engine.keep_ops),
        decompose,
        own_order=is_running(),
    )
    pricing = pricing_on(_device_of(candidates))
    key = _partitionings_key(candidates, pricing) if len(candidates) > 1 else ""
    kept = pricing.timings.get(PARTITIONING_TIMINGS, key, pricing.device) if key and pricing.timings is not None else {}
    if prepared.has_collectives:  # by estimate, as on the other ranks, whatever this one's cache has
        candidates, kept = candidates[:1], {}
    elif kept:
        candidates = tuple(
            sorted(candidates, key=lambda partitioning: kept.get(", ".join(partitioning.order), math.inf))
        )[:1]
    elif config.placement == "estimate" or not prepared.is_repeatable:
        candidates = candidates[:1]
    return Partitioned(prepared, tuple(candidates), key, kept)


def compile_regions(partitioned: Partitioned, session: Session, config: Config, pricing_on: PricingOn) -> Compiled:
    """Compile every region of every partitioning, with each engine that may run it."""
    deadline = pricing_on(_device_of(partitioned.partitionings)).deadline
    candidates = _compile_partitionings(partitioned.partitionings, session, config, deadline)
    compiled = Compiled(partitioned.prepared, candidates, partitioned.timing_key, partitioned.kept)
    # What is found without the regions that are still being built, or could not be here, says nothing of later processes.
    return dataclasses.replace(compiled, timing_key="") if compiled.pending or compiled.is_partial else compiled


def partition_and_compile(prepared: Prepared, session: Session, config: Config, pricing_on: PricingOn) -> Compiled:
    """Partition the graph and compile its regions."""
    return compile_regions(partition(prepared, session, config, pricing_on), session, config, pricing_on)


def _device_of(candidates: Sequence[Partitioning]) -> Device:
    """Device under which a graph's timings are kept: the first device other than the host that it uses."""
    devices = (s.region.device for partitioning in candidates for s in partitioning.partition.graph.segments)
    return next((device for device in devices if not device.is_host), CPU)


def _partitionings_key(candidates: Sequence[Partitioning], pricing: Pricing) -> str:
    """Key of the costs of partitionings: their regions, who may run them, and the engines' versions; "" where an engine has none."""
    engines = sorted({name for partitioning in candidates for name in partitioning.order})
    if not all(pricing.versions.get(name) for name in engines):
        return ""
    shapes = [
        [[s.region.key, *partitioning.partition.able[s.region.name]] for s in partitioning.partition.graph.segments]
        for partitioning in candidates
    ]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return timing_key(digest, {**{name: pricing.versions[name] for name in engines}, EAGER: torch.__version__})


def _compile_partitionings(
    candidates: Sequence[Partitioning], session: Session, config: Config, deadline: Deadline
) -> tuple[CompiledPartitioning, ...]:
    """Each engine compiles all its regions together; a region that partitionings have in common is compiled once."""
    names = [engine.name for engine in session.engines]
    results: dict[tuple[_Identity, str], Candidate] = {}
    for engine in session.engines:
        regions: dict[_Identity, Region] = {}
        for partitioning in candidates:
            for segment in partitioning.partition.graph.segments:
                identity = _identity(segment)
                if engine.name not in partitioning.partition.candidates(segment, names):
                    continue
                if identity in regions or (identity, engine.name) in results:
                    continue  # of an earlier partitioning
                verdict = accepted(engine, segment.region, strict=config.strict)
                if isinstance(verdict, Refused):
                    results[identity, engine.name] = verdict
                else:
                    regions[identity] = segment.region
        if not regions:
            continue
        with unset_fake_temporarily():  # AOTAutograd is still tracing: an engine's own tensors would be fake
            compiled = compile_in_time(engine, list(regions.values()), deadline)
        results.update(((identity, engine.name), made) for identity, made in zip(regions, compiled, strict=True))

    def region_candidates(partitioning: Partitioning, segment: Segment) -> dict[str, Candidate]:
        return {name: results[_identity(segment), name] for name in partitioning.partition.candidates(segment, names)}

    return tuple(
        CompiledPartitioning(
            partitioning,
            {s.region.name: region_candidates(partitioning, s) for s in partitioning.partition.graph.segments},
        )
        for partitioning in candidates
    )


_Identity = tuple[str, tuple[str, ...]]


def _identity(segment: Segment) -> _Identity:
    """Key in which two partitionings' regions must agree to be one."""
    return segment.region.key, segment.region.node_names


def place(
    compiled: Compiled, inputs: Sequence[Any], config: Config, pricing_on: PricingOn, agreement: Agreement | None = None
) -> tuple[Assignment, list[Any]]:
    """Try every region's engines on the inputs of a call, one partitioning after the other, and keep the cheapest partitioning; with it the
    call's outputs. `agreement`: with other ranks, on the only partitioning; then the outputs are eager's.

    A partitioning costs what its regions cost on their winners, what eager's segments cost, and what its boundaries cost. One that costs more
    than the best of those before it is given up as soon as that shows.
    """
    tried: dict[_Identity, Choice] = {}
    outputs: list[Any] | None = None
    best: tuple[float, Assignment] | None = None
    costs: list[Cost] = []
    begun: list[Pending] = []
    load = OtherLoad()
    for candidate in compiled.partitionings:
        alone = len(compiled.partitionings) == 1
        trial = _PartitioningTrial(
            candidate,
            config,
            pricing_on,
            tried,
            begun,
            math.inf if best is None else best[0],
            agreement,
            times_eager=not alone,
        )
        try:
            with Progress(
                "checking and timing regions", len(candidate.partitioning.partition.graph.segments)
            ) as progress:
                results = trial.executor(compiled.prepared).run(inputs, stepping(progress, trial.run))
        except _TooDearError:
            costs.append(Cost(candidate.order, trial.spent_us, "more than"))
            continue
        outputs = results if outputs is None else outputs
        assignment = Assignment(
            compiled.prepared,
            candidate.partitioning.partition,
            trial.compiled,
            trial.decisions,
            is_partial=compiled.is_partial,
        )
        if alone:
            best = 0.0, assignment
            break
        runs = {s.region.name: trial.engine_of(s.region.name) for s in candidate.partitioning.partition.graph.segments}
        from_python = {name for name, made in trial.compiled.items() if made.program is None}
        total = trial.spent_us + callbacks_us(candidate.partitioning.partition.graph, runs, from_python)
        costs.append(Cost(candidate.order, total, "measured"))
        if best is None or total < best[0]:
            best = total, assignment
    assert best is not None
    assert outputs is not None
    pricing = pricing_on(_device_of([candidate.partitioning for candidate in compiled.partitionings]))
    # As in `compile_regions`: what is found without a form that is still being built says nothing of later processes.
    if costs and compiled.timing_key and not begun and pricing.timings is not None:
        kept = {cost.engine: cost.microseconds for cost in costs}
        pricing.timings.put(
            PARTITIONING_TIMINGS, compiled.timing_key, pricing.device, kept, is_disturbed=load.is_felt()
        )
    costs += [Cost(order, microseconds, "cached") for order, microseconds in compiled.kept.items()]
    return dataclasses.replace(best[1], partitionings=tuple(costs), begun=tuple(begun)), outputs


class _TooDearError(Exception):
    """A partitioning that is being priced costs more than another."""


class _PartitioningTrial:
    """A partitioning on the inputs of one call. Owns the choices made so far, and their cost."""

    def __init__(
        self,
        candidate: CompiledPartitioning,
        config: Config,
        pricing_on: PricingOn,
        tried: dict[_Identity, Choice],
        begun: list[Pending],
        limit_us: float,
        agreement: Agreement | None,
        *,
        times_eager: bool,
    ) -> None:
        """tried, begun: what earlier trials found out, and began to have built, added to.
        limit_us: cost at which to give up. times_eager: eager's segments count."""
        self.compiled: dict[str, CompiledRegion] = {}
        self.decisions: dict[str, RegionDecision] = {}
        self.spent_us = 0.0
        self._candidate = candidate
        self._config = config
        self._pricing_on = pricing_on
        self._tried = tried
        self._begun = begun
        self._limit_us = limit_us
        self._agreement = agreement
        self._times_eager = times_eager

    def executor(self, prepared: Prepared) -> PythonExecutor:
        """Executor that calls `run` for each segment."""
        partition, candidates = self._candidate.partitioning.partition, self._candidate.candidates
        runs = [segment.region.eager for segment in partition.graph.segments]
        titles = _titles(partition, {name: "placement" for name, some in candidates.items() if some})
        return PythonExecutor(partition.graph, runs, prepared.hoisted.inputs, prepared.fold, titles)

    def engine_of(self, region: str) -> str:
        """Name of the engine that runs a region."""
        return self.decisions[region].engine if region in self.decisions else EAGER

    def run(self, index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
        """Choose a region's engine on its inputs; its outputs. Raises _TooDearError."""
        check()
        region = segment.region
        candidates = {name: _ready(made) for name, made in self._candidate.candidates[region.name].items()}
        if not candidates:
            with apart():
                outputs: Sequence[Any] = region.eager(arguments)
            if self._times_eager:
                rounds = Rounds(warmup_rounds=0, min_rounds=2, timer=self._pricing_on(region.device).timer)
                (timing,) = measure([lambda: region.eager(arguments)], self._config.measure_budget_s, **rounds)
                self._spend(timing.low_us)
            return outputs
        choice = self._tried.get(_identity(segment))
        if choice is None:
            with apart() if region.draws else contextlib.nullcontext():
                choice = self._choose(index, region, candidates, arguments)
            release_unused()
            self._tried[_identity(segment)] = dataclasses.replace(choice, outputs=[])  # they would be kept alive
            compiled = [made for made in candidates.values() if isinstance(made, CompiledRegion)]
            self._begun += choice.pending
            self._begun += [each for each in (made.begun() for made in compiled) if each is not None]
            outputs = choice.outputs
        else:
            with apart() if region.draws else contextlib.nullcontext():
                outputs = region.eager(arguments) if choice.compiled is None else choice.compiled(arguments)
        decision = dataclasses.replace(choice.decision, name=region.name)
        self.decisions[region.name] = decision
        if choice.compiled is not None:
            self.compiled[region.name] = _watched(region, decision.engine, choice.compiled, self._config)
        engine_us = next((cost.microseconds for cost in decision.costs if cost.engine == decision.engine), 0.0)
        self._spend(engine_us)
        return outputs

    def _choose(
        self, index: int, region: Region, candidates: Mapping[str, Candidate], arguments: Sequence[Any]
    ) -> Choice:
        pricing = self._pricing_on(region.device)
        if self._agreement is None:
            return choose(region, candidates, arguments, self._config, pricing)
        return choose_alike(self._agreement, index, region, candidates, arguments, self._config, pricing)

    def _spend(self, microseconds: float) -> None:
        self.spent_us += microseconds
        if self.spent_us > self._limit_us:
            raise _TooDearError


def _ready(candidate: Candidate) -> Candidate:
    """The candidate that was built elsewhere, if it is done by now."""
    if not isinstance(candidate, PendingRegion) or not candidate.done:
        return candidate
    try:
        return candidate.result()
    except failures(Exception) as error:  # whatever stopped it
        return error


def _watched(region: Region, engine: str, compiled: CompiledRegion, config: Config) -> CompiledRegion:
    """The region as plans call it: compared with eager under `verify=always`, its errors told from the user's where it runs from Python."""
    if config.verify == "always":
        return checked(region, engine, compiled, strict=config.strict)
    return compiled if compiled.program is not None else reported(compiled)


def build_executable(
    assignment: Assignment, inputs: Sequence[Any], config: Config, *, is_saved: bool = False
) -> Executable:
    """Build what runs every call from now on: one C++ plan, with the constants of a call's inputs, or where that cannot be the Python executor.

    The plan itself calls the operators of segments that eager runs, where it can (`docs/adr/0128-eager-segments-as-operator-steps.md`); their
    errors are then the plan's. is_saved: the plan goes to a file, and so draws no random numbers by such calls.
    Graphs with collectives run from Python (`docs/adr/0015-collectives.md`). Raises HybridError under `strict` where the plan cannot be built.
    """
    prepared, graph = assignment.prepared, assignment.partition.graph
    if prepared.has_collectives:
        return Executable(assignment, assignment.python_executor())
    build = build_executor if graph.is_static else SymbolicExecutor
    runs = _as_operators(assignment, draws=not is_saved) if is_saved or assignment.compiled else assignment.runs
    try:
        run = build(graph, runs, prepared.hoisted.inputs, prepared.fold, assignment.titles, graphs=config.cuda_graphs)
        run.bind(inputs)
    except StaticLayoutError as error:
        log.info("this graph runs from Python, segment by segment: %s", error)
        return Executable(assignment, assignment.python_executor())
    except HybridError as error:
        if config.strict or is_sticky(error):
            raise
        log.warning("this graph runs from Python, segment by segment: %s", error)
        return Executable(assignment, assignment.python_executor())
    for compiled in assignment.compiled.values():
        compiled.release()  # the plan keeps packed constants of its own, or shares these
    programs = [compiled.program for compiled in assignment.compiled.values() if compiled.program is not None]
    if any(program.random is not None and not program.device.is_host for program in programs):
        eager = assignment.eager_executor()
        eager.bind(inputs)
        return Executable(assignment, _UnlessCaptured(run, eager))
    return Executable(assignment, run)


def _as_operators(assignment: Assignment, *, draws: bool) -> list[CompiledSegment]:
    """Callables that run the segments; those of eager have programs where they can, without random operators unless `draws`."""
    runs: list[CompiledSegment] = []
    for segment, run in zip(assignment.partition.graph.segments, assignment.runs, strict=True):
        try:
            runs.append(operator_region(segment.region, draws=draws) if run is segment.region.eager else run)
        except NotNativeError as error:
            log.info("Python runs %s: %s", segment.region.name, error)
            runs.append(run)
    return runs


@dataclass(frozen=True, slots=True)
class _UnlessCaptured:
    """A plan whose kernels draw random numbers, and eager in its place while the caller captures a CUDA graph: only eager's operators draw new
    ones in each replay. Another stream of the thread's than the current one is not looked at."""

    plan: Run
    eager: PythonExecutor

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        if torch.cuda.is_current_stream_capturing():
            return self.eager(inputs)
        return self.plan(inputs)


def _titles(partition: Partition, engines: Mapping[str, str]) -> list[str]:
    """Titles that a profiler shows for the segments: each one's name in the plan and who runs it."""
    names = (segment.region.name for segment in partition.graph.segments)
    return [f"hybrid::{name} {engines.get(name, EAGER)}" for name in names]
