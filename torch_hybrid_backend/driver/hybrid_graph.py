"""HybridGraph: one captured graph from its compilation to its calls, through the stages of `stages`. Part of the wiring."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torch_hybrid_backend.builds.background import copies_of
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, Pending
from torch_hybrid_backend.core.plan import Plan, Profile
from torch_hybrid_backend.core.region import Region, Segment
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.driver.agreed import agreement_on, groups_in, tell_of_eager
from torch_hybrid_backend.driver.garbage import full_collections_held
from torch_hybrid_backend.driver.pending_builds import NextCall, choose_when_built, choose_when_served
from torch_hybrid_backend.driver.precision_accuracy_check import (
    LaterAccuracyCheck,
    check_accuracy,
    check_accuracy_again,
)
from torch_hybrid_backend.driver.precision_speed_check import as_known, fastest
from torch_hybrid_backend.driver.prepared import Prepared, copy_of, prepare
from torch_hybrid_backend.driver.session import Session
from torch_hybrid_backend.driver.stages import (
    Assignment,
    Compiled,
    Executable,
    Partitioned,
    Run,
    TimedRun,
    build_executable,
    compile_regions,
    partition,
    partition_and_compile,
    place,
)
from torch_hybrid_backend.errors import HybridError, RefusedValuesError, failures, ignored, is_out_of_memory, is_sticky
from torch_hybrid_backend.generators import draws_apart, is_captured
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.partition.deviation import any_telling
from torch_hybrid_backend.partition.placement import Pricing
from torch_hybrid_backend.partition.reference import replay_of
from torch_hybrid_backend.processes.fork_lock import ForkLock
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.ranks.agreement import Agreement
from torch_hybrid_backend.ranks.peers import at_work, peers
from torch_hybrid_backend.runtime.constant_pool import ConstantPool
from torch_hybrid_backend.runtime.executor import Executor
from torch_hybrid_backend.runtime.native.ops import give_back_freed_memory, watches_writes
from torch_hybrid_backend.runtime.offload import OffloadedWeights
from torch_hybrid_backend.runtime.python_executor import PythonExecutor, checked
from torch_hybrid_backend.runtime.symbolic_executor import SymbolicExecutor

log = logging.getLogger(__name__)

# How many later calls of a graph in reduced precision are compared at most: the first, then after 2, 4, 8, ... others.
_MAX_CHECKS = 8

OnPlan = Callable[[Plan], None]
# A compilation, what of it was still being built, who runs what, and the outputs of the call that decided it.
_Chosen = tuple[Compiled, list[Pending], Assignment, list[Any]]
# Gets the regions of a plan that engines run, by name and in order.
OnRegions = Callable[[Mapping[str, CompiledRegion]], None]
# Puts eager in the place of a graph, which gets a title, until that is built off the call; what is to be called.
Meanwhile = Callable[[str, EagerGraph, "HybridGraph"], Callable[[list[Any]], list[Any]]]


class HybridGraph:
    """A captured graph. The first call chooses engines on the real inputs; later calls run the resulting plan.

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
        *,
        meanwhile: Meanwhile | None = None,
        working: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_graph: Callable[[HybridGraph], None] | None = None,
    ) -> None:
        """`deadline`: for the kernels of this graph and of others that are compiled with it; None: of `config`, for this one. `meanwhile`: the
        graph is compiled in its first call, by the build thread (`builds/background.py`), and so are the bodies of its control flow. Eager
        answers until then.
        `working`: entered for the first call. `on_graph`: gets this graph, and those of the bodies of its control flow."""
        start = time.perf_counter()
        self._name = name
        self._config = config
        self._session = session
        self._on_plan = on_plan
        self._on_regions = on_regions
        self._deadline = deadline or Deadline(config.compile_deadline_s)
        self._lock = ForkLock()
        names = [node.name for node in captured.graph_module.graph.find_nodes(op="placeholder")]
        self._meanwhile = meanwhile
        self._working = working
        self._on_graph = on_graph
        self._static = frozenset(k for k, each in enumerate(names) if each in captured.static_inputs)
        self._to_check: Compiled | None = None  # what is chosen from once more if a later call is off
        self._checks = 0
        self._offloaded: OffloadedWeights | None = None
        self._is_inference = captured.kind == "inference"
        self._frees_inputs = captured.kind == "backward"  # what was saved for it
        self._groups = groups_in(captured.graph_module)
        self._members = sorted(set().union(*self._groups))
        prepared = prepare(captured, name, config, self._compile_body, session.keeps_packed)
        prepared = as_known(prepared, config, self._pricing())
        partitioned = partition(prepared, session, config, self._pricing())
        # Replaced as a whole: whoever is interrupted, or comes from another thread, finds one stage or the next.
        self._state: Partitioned | Compiled | Executable = (
            self._compiled(partitioned) if meanwhile is None else partitioned
        )
        if on_graph is not None:
            on_graph(self)
        log.info(
            "%s graph: %s in %.2f s",
            captured.kind,
            "compiled" if meanwhile is None else "partitioned",
            time.perf_counter() - start,
        )

    @property
    def plan(self) -> Plan | None:
        """The decisions; None before the first call."""
        return self._state.plan if isinstance(self._state, Executable) else None

    @property
    def is_ready(self) -> bool:
        """True if the next call runs a plan, and waits for nothing."""
        return isinstance(self._state, Executable)

    @property
    def assignment(self) -> Assignment:
        """Engine of each region, once the first call has chosen."""
        return self._executable().assignment

    @property
    def executor(self) -> TimedRun | None:
        """The runner of its plan, once the first call has chosen; None where Python runs the graph segment by segment."""
        return self._executable().executor

    @contextlib.contextmanager
    def timed_by(self, make: Callable[[TimedRun], Run]) -> Iterator[None]:
        """Have what `make` makes of the plan's executor run the graph's calls meanwhile."""
        before = self._state
        executor = before.executor if isinstance(before, Executable) else None
        if not isinstance(before, Executable) or executor is None:
            yield
            return
        self._state = timed = Executable(before.assignment, make(executor))
        try:
            yield
        finally:
            with self._lock:
                if self._state is timed:
                    self._state = before

    def tell(self, profile: Profile | None) -> None:
        """Tell the plan anew, with times."""
        if self._on_plan is not None and isinstance(self._state, Executable):
            self._on_plan(dataclasses.replace(self._state.plan, profile=profile))

    def copied(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of a call for the build thread: copies, but for the parameters and buffers of an inference graph, which stay live."""
        return copies_of(inputs, lambda position, _: self._is_inference and position in self._static)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        state = self._state
        if not isinstance(state, Executable):
            with self._lock, self._working(), self._at_work(is_first_call=True):
                if self._state is state:
                    with self._calling(is_ready=False):
                        outputs = self._first_call(state, inputs)
                    if not _is_repeatable_here(state.prepared):
                        return outputs
                    del outputs
            # By what engines were chosen for, so that the first call returns what every later call does. Or another thread chose them.
            return self(inputs)
        run = state.run
        try:
            if self._frees_inputs and isinstance(run, Executor):
                return run.run_freeing(inputs)
            if not isinstance(run, PythonExecutor):
                return run(inputs)
            with self._calling(is_ready=True):
                return run.run(inputs, self._guarded)
        except RefusedValuesError:
            return state.assignment.eager_executor()(inputs)  # PyTorch raises, for it knows what
        except HybridError as error:
            if self._config.strict or state.assignment.prepared.has_collectives or is_sticky(error):
                raise
            if self._frees_inputs and not inputs:
                raise  # what was saved for this call is gone
            failed = error
        except failures(RuntimeError) as error:
            self._raise_named(error)
            raise
        if is_out_of_memory(failed):
            return self._in_eager(state.assignment, inputs, failed)
        with self._lock:
            if self._executable().run is run:
                return self._recover(inputs, failed)
        return self(inputs)  # another thread, which met the same fault, has put something else in its place

    def _first_call(self, state: Partitioned | Compiled, inputs: Sequence[Any]) -> list[Any]:
        if isinstance(state, Partitioned):
            start = time.perf_counter()
            self._state = state = self._compiled(state)
            log.info("%s graph: compiled in %.2f s", state.prepared.kind, time.perf_counter() - start)
        return self._choose(state, inputs)

    @full_collections_held()
    def _choose(self, compiled: Compiled, inputs: Sequence[Any]) -> list[Any]:
        """Choose engines on a call's inputs; its outputs."""
        start = time.perf_counter()
        with ConstantPool():
            agreement = self._agreement_on(compiled)
            try:
                if agreement is not None:
                    agreement.meet()
                compiled, pending, assignment, outputs = self._chosen(compiled, inputs, agreement)
            except BaseException as error:  # an interrupt, too: the other ranks wait
                if agreement is not None:
                    agreement.refuse(f"rank {agreement.rank} raised {type(error).__name__} in its first call")
                self._raise_named(error)
                raise
            if agreement is not None:
                assignment = self._settled(assignment, agreement)
            executable = build_executable(assignment, inputs, self._config)
            self._tell(executable, assignment)
            self._state = executable  # last: interrupted before, the next call is a first call again
        if assignment.compiled:  # else nothing was packed, and the C++ runtime may not even be there
            self._offload(executable, inputs)
            give_back_freed_memory()
        log.info("%s graph: engines chosen in %.2f s", assignment.prepared.kind, time.perf_counter() - start)
        compiled = dataclasses.replace(compiled, prepared=assignment.prepared)
        if pending:
            choose_when_built(self, compiled, pending)
        elif assignment.prepared.reduced is not None:
            self._check_later(compiled)
        else:
            choose_when_served(self, compiled, executable.run, inputs)
        return outputs

    def _offload(self, executable: Executable, inputs: Sequence[Any]) -> None:
        """Move weights to a file under the setting `offload_weights`."""
        run = executable.executor
        if (
            not self._config.offload_weights
            or not self._is_inference
            or not isinstance(run, Executor | SymbolicExecutor)
        ):
            return
        if not watches_writes():
            log.warning(
                "offload_weights has no effect: this system cannot tell which pages were written to (Linux 6.7 can, docs/live_weights.md)"
            )
            return
        with ignored(OSError):  # then `offload` says what is wrong
            self._config.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._offloaded = run.offload(inputs, self._config.cache_dir)
        log.info("%d bytes of weights lie in a file", self._offloaded.size_bytes)

    def give_back_memory(self) -> None:
        """Free memory that timing calls of eager has taken."""
        if self._offloaded is not None:
            self._offloaded.page_out()
        if self.plan is not None and self.assignment.compiled:
            give_back_freed_memory()

    def _agreement_on(self, compiled: Compiled) -> Agreement | None:
        """Agreement of all ranks on a graph with collectives; None where none is needed, or wanted."""
        if not self._members:
            return None
        (only,) = compiled.partitionings  # of a graph with collectives: see `partition`
        graph = only.partitioning.partition.graph
        return agreement_on(graph, only.candidates, self._members, self._session, self._config)

    def _settled(self, assignment: Assignment, agreement: Agreement) -> Assignment:
        """The assignment that all ranks have; eager's if they do not all have this one. Raises RankError for that under `strict`."""
        agreement.settle()
        if not agreement.why_not:
            return assignment
        tell_of_eager(agreement.why_not, strict=self._config.strict)
        return assignment.in_eager(Refused(Reason.RANKS_DISAGREE, agreement.why_not))

    def _raise_named(self, error: BaseException) -> None:
        """Raise an error that names the ranks that are at fault for a call's error, if other ranks are."""
        them = peers() if self._members and self._config.ranks_agree else None
        named = error if them is None else them.named(error, self._members)
        if named is not error:
            raise named from error

    def _calling(self, *, is_ready: bool) -> AbstractContextManager[None]:
        """Count a call with collectives, so that other ranks know which call this one is in."""
        them = peers() if self._groups and self._config.ranks_agree else None
        return nullcontext() if them is None else them.calling(self._groups, is_ready=is_ready)

    def _at_work(self, *, is_first_call: bool = False) -> AbstractContextManager[None]:
        """Have other ranks wait longer for this one; not in first calls with collectives, in which it may wait for them."""
        return at_work(is_on=self._config.ranks_agree and not (is_first_call and self._members))

    def _chosen(self, compiled: Compiled, inputs: Sequence[Any], agreement: Agreement | None) -> _Chosen:
        """Choose an engine for each region; return the choices and the call's outputs.

        Where parameters changed meanwhile, by an optimizer in another thread, say, results that were compared do not belong together: nothing
        that was found counts, and all is done again on copies of them. Not where a call cannot be repeated unnoticed.
        """
        if not _is_repeatable(compiled.prepared):
            return self._assign_and_check(compiled, inputs, agreement)
        before = self._versions(inputs)
        try:
            chosen = self._assign_and_check(compiled, inputs)
            if self._versions(inputs) == before:
                return chosen
        except failures(Exception):  # whatever came of parameters that changed
            if self._versions(inputs) == before:
                raise
        log.info("parameters changed while engines were chosen: once more, on copies of them")
        return self._assign_and_check(compiled, copies_of(inputs, lambda position, _: position not in self._static))

    def _versions(self, inputs: Sequence[Any]) -> list[int]:
        """Version of each parameter, as PyTorch counts its changes. Inference tensors have none."""
        tensors = (inputs[position] for position in sorted(self._static))
        return [
            0 if tensor.is_inference() else tensor._version for tensor in tensors if isinstance(tensor, torch.Tensor)
        ]

    def _assign_and_check(
        self, compiled: Compiled, inputs: Sequence[Any], agreement: Agreement | None = None
    ) -> _Chosen:
        tried = [(compiled, compiled.pending)]  # before it is placed: what is built meanwhile did not take part

        def place_anew(anew: Prepared) -> tuple[Assignment, list[Any]]:
            compiled = partition_and_compile(anew, self._session, self._config, self._pricing())
            tried.append((compiled, compiled.pending))
            return self._assign(compiled, inputs)

        def faster(assignment: Assignment, outputs: list[Any]) -> tuple[Assignment, list[Any]]:
            return fastest(assignment, outputs, inputs, self._config, self._pricing(), place_anew)

        assignment, outputs = faster(*self._assign(compiled, inputs, agreement))
        with Progress("checking the outputs"):
            assignment, outputs = check_accuracy(assignment, outputs, inputs, self._config, place_anew, faster)
        hoisted = assignment.prepared.hoisted  # the two checks change `prepared`, not this
        compiled, pending = next(each for each in tried if each[0].prepared.hoisted is hoisted)
        # It would hold what was built for as long as the plan lives.
        return compiled, [*pending, *assignment.begun], dataclasses.replace(assignment, begun=()), outputs

    def choose_anew(self, compiled: Compiled, inputs: Sequence[Any]) -> None:
        """Choose engines once more, with what was built elsewhere among them; calls go on meanwhile. Of an error that comes of it, one WARNING,
        and all stays as it is; under `strict` later calls raise it."""
        try:
            self._choose(compiled, inputs)
        except failures(Exception) as error:  # whatever it is: what ran calls before goes on
            log.warning("what was built meanwhile is not used: %s: %s", type(error).__name__, error)
            if self._config.strict:
                self._state = Executable(self._executable().assignment, functools.partial(_raise, error))

    def _check_later(self, compiled: Compiled) -> None:
        """Have a later call compared with the graph as written, as those before told nothing of some layers; a few times at most."""
        self._to_check = compiled
        self._checks += 1
        if self._checks <= _MAX_CHECKS:
            self.with_next_call(functools.partial(LaterAccuracyCheck, self, self._checks))

    def check_again(self, inputs: Sequence[Any]) -> None:
        """Compare a call with the graph as written. Layers that are off return, as in a first call."""
        compiled, self._to_check, executable = self._to_check, None, self._executable()
        assert compiled is not None
        after = check_accuracy_again(executable.assignment, inputs)
        if after is None:
            self.choose_anew(compiled, inputs)
            return
        with self._lock:
            self._state = Executable(after, self._executable().run)
            self._tell(self._state, after)
            if after.prepared.reduced is not None:
                self._check_later(compiled)

    def varies(self, inputs: Sequence[Any]) -> bool:
        """True if a call's inputs, parameters apart, tell something of its errors."""
        return any_telling([value for position, value in enumerate(inputs) if position not in self._static])

    def with_next_call(self, make: Callable[[Run | PythonExecutor], NextCall | LaterAccuracyCheck]) -> None:
        """Have the next call run what `make` makes of what runs calls now."""
        with self._lock:
            executable = self._executable()
            self._state = Executable(executable.assignment, make(executable.run))

    def without_next_call(self, sampling: NextCall | LaterAccuracyCheck) -> bool:
        """Undo `with_next_call`; False where another thread has."""
        with self._lock:
            executable = self._executable()
            if executable.run is not sampling:
                return False
            self._state = Executable(executable.assignment, sampling.run)
            return True

    def _compiled(self, partitioned: Partitioned) -> Compiled:
        with self._at_work():
            return compile_regions(partitioned, self._session, self._config, self._pricing())

    def _assign(
        self, compiled: Compiled, inputs: Sequence[Any], agreement: Agreement | None = None
    ) -> tuple[Assignment, list[Any]]:
        assignment, outputs = place(compiled, inputs, self._config, self._pricing(), agreement)
        # A graph that can run once more does, at the end. Until then its outputs would take memory.
        return assignment, [] if _is_repeatable_here(compiled.prepared) else outputs

    def _tell(self, decided: Assignment | Executable, assignment: Assignment) -> None:
        if self._on_plan is not None:
            self._on_plan(decided.plan)
        if self._on_regions is not None:
            self._on_regions(assignment.compiled)

    @staticmethod
    def _in_eager(assignment: Assignment, inputs: Sequence[Any], error: HybridError) -> list[Any]:
        """A call found no memory: eager may do with less, or raises PyTorch's error. The plan is not to blame: later calls run it."""
        log.warning("eager runs this call, later ones are tried as before: %s", error)
        return assignment.python_executor().run(
            inputs, lambda _index, segment, arguments: segment.region.eager(arguments)
        )

    def _recover(self, inputs: Sequence[Any], error: HybridError) -> list[Any]:
        """A call failed: run it segment by segment, give to eager what fails, and build the fast path anew."""
        before = self._executable().assignment
        outputs = before.python_executor().run(inputs, self._guarded)
        after = self._executable().assignment
        if after is before:
            # Every segment ran: the fault was in the plan around them. Stay in Python rather than fail again.
            log.warning("this graph runs from Python, segment by segment, from now on: %s", error)
            self._state = Executable(before, before.python_executor())
        else:
            self._state = build_executable(after, inputs, self._config)
        return outputs

    def _guarded(self, _index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
        """Results of a segment. A region that fails goes to eager, in this call and from then on; in this call alone if the values are at
        fault, or there is no memory. Raises what eager does."""
        region = segment.region
        compiled = self._executable().assignment.compiled.get(region.name)
        if compiled is not None and not (region.draws and is_captured(region.device)):
            replay = replay_of(region)
            try:
                return checked(segment, compiled(arguments))
            except failures(Exception) as error:  # whatever a compiled region raises, eager is there for it
                if is_sticky(error):
                    raise
                cause = error
            replay.rewind()
            outputs = region.eager(arguments)
            if not isinstance(cause, RefusedValuesError) and not is_out_of_memory(cause):
                self._give_to_eager(region, cause)
            return outputs
        return region.eager(arguments)

    def _give_to_eager(self, region: Region, cause: Exception) -> None:
        with self._lock:
            executable = self._executable()
            if region.name not in executable.assignment.compiled:
                return  # another thread met the same fault
            assignment = executable.assignment.without(region, cause, strict=self._config.strict)
            self._state = Executable(assignment, executable.run)
            self._tell(assignment, assignment)

    def _executable(self) -> Executable:
        assert isinstance(self._state, Executable)
        return self._state

    def _pricing(self) -> Callable[[Device], Pricing]:
        return functools.cache(functools.partial(pricing_of, self._session, self._config, self._deadline))

    def _compile_body(self, name: str, body: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        """A branch or loop body as a graph of its own, which eager runs where compiling it fails."""
        title, meanwhile = f"{self._name}.{name}", self._meanwhile
        written = EagerGraph(copy_of(body.graph_module)) if meanwhile is not None else None  # before passes change it
        try:
            graph = HybridGraph(
                body,
                self._session,
                self._config,
                self._on_plan,
                title,
                self._deadline,
                self._on_regions,
                meanwhile=meanwhile,
                on_graph=self._on_graph,
            )
            return graph if meanwhile is None or written is None else meanwhile(title, written, graph)
        except HybridError as error:
            if self._config.strict:
                raise
            log.warning("the sub-graph %s of a control flow operator runs in eager: %s", name, error)
            return EagerGraph(body.graph_module)


def _is_repeatable(prepared: Prepared) -> bool:
    """True if a call that this thread makes now can be repeated unnoticed."""
    return prepared.is_repeatable_apart if draws_apart() else _is_repeatable_here(prepared)


def _is_repeatable_here(prepared: Prepared) -> bool:
    """True if the graph can run once more on the inputs of the call at hand itself, not on copies of them."""
    return prepared.is_repeatable and not prepared.has_collectives


def _raise(error: Exception, _inputs: Sequence[Any]) -> list[Any]:
    raise error


def pricing_of(session: Session, config: Config, deadline: Deadline, device: Device) -> Pricing:
    """Everything that pricing needs of work on a device of the machine as it is now: threads may have been set since the last graph."""
    timings = session.services.timings if config.cache else None
    return Pricing(timings, session.versions(device), device, deadline, session.services.timer(device))
