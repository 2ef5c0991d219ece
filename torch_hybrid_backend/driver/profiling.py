"""Times of a model's calls, kernel by kernel: what `explain(..., profile=True)` shows. Part of the wiring.

Calls of the model take turns: one is timed as it is, with each graph in it, and one tells what each step of each plan takes. Medians count.
Calls that nobody times pay nothing: what runs a graph is replaced while it is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx
from torch.utils.flop_counter import FlopCounterMode

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Ceilings, KernelTime, Profile
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.session import Session
from torch_hybrid_backend.driver.stages import Assignment
from torch_hybrid_backend.graph.source import module_call, source_line
from torch_hybrid_backend.measuring.other_load import OtherLoad
from torch_hybrid_backend.partition.estimate import value_bytes
from torch_hybrid_backend.partition.kernel_work import Work, eager_work, kernel_work
from torch_hybrid_backend.partition.whole_call import PricedCall
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.runtime.executor import StepTime
from torch_hybrid_backend.runtime.plan_layout import StepOrigin
from torch_hybrid_backend.torch_private import tree_leaves

# Rounds of two calls: as many as the budget allows, between these.
_BUDGET_S, _LEAST_ROUNDS, _MOST_ROUNDS = 2.0, 5, 100
# Dynamo compiles a function eight times at most, then leaves it in eager.
_MOST_WARMUP_CALLS = 12

_CEILINGS = "ceilings"  # their kind in the cache of timings
# Precisions of which ceilings are known, in the order in which they are shown.
_PRECISIONS = ("float32", "bfloat16", "int8")

# Returns a call's outputs, and what its steps took.
Timed = Callable[[], tuple[Any, Sequence[StepTime]]]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Kernels that a row is for: those that compute the same nodes, or where these are not known one kernel by its label."""

    region: str
    nodes: frozenset[str]
    label: str = ""

    @staticmethod
    def of(origins: Sequence[StepOrigin]) -> _Kernel:
        nodes = frozenset[str]().union(*(origin.nodes for origin in origins))
        return _Kernel(origins[0].region, nodes, "" if nodes else _labels(origins))


def _labels(origins: Sequence[StepOrigin]) -> str:
    return " + ".join(dict.fromkeys(origin.label for origin in origins if origin.label))


class Watch:
    """Times of one graph in each call of the model: nanoseconds as a whole, and by kernel where a call is timed step by step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._spent, self._steps = 0, dict[_Kernel, int]()
        self.plain_ns: list[int] = []
        self.steps: list[Mapping[_Kernel, int]] = []
        self.labels: dict[_Kernel, str] = {}
        self.is_nested = False

    def run(self, plain: Callable[[], Any], timed: Timed) -> Any:
        """The outputs of a call, by whichever way it is the turn of."""
        self.is_nested |= self._turns.depth > 0
        self._turns.depth += 1
        start = time.perf_counter_ns()
        try:
            outputs, steps = timed() if self._turns.by_step else (plain(), ())
        finally:
            self._turns.depth -= 1
        self._spent += time.perf_counter_ns() - start
        for step in steps:
            kernel, label = _Kernel.of(step.origins), _labels(step.origins)
            known = self.labels.setdefault(kernel, label)
            if label not in known.split(" + "):
                self.labels[kernel] = f"{known} + {label}"
            self._steps[kernel] = self._steps.get(kernel, 0) + step.nanoseconds
        return outputs

    def end_call(self) -> None:
        """A call of the model is over."""
        if self._turns.by_step:
            self.steps.append(self._steps)
        else:
            self.plain_ns.append(self._spent)
        self._spent, self._steps = 0, {}

    def us(self, kernel: _Kernel) -> float:
        """Median microseconds of a kernel in a call."""
        return statistics.median(steps.get(kernel, 0) for steps in self.steps) / 1e3

    def profile(self, kernels: Sequence[KernelTime]) -> Profile | None:
        """The graph's profile; None where no call ran it."""
        if not kernels:
            return None
        call_us = statistics.median(self.plain_ns) / 1e3
        # Not of the calls that are timed step by step: telling the times is no part of a call.
        overhead_us = max(0.0, call_us - sum(kernel.microseconds for kernel in kernels))
        return Profile(call_us, len(self.plain_ns), tuple(kernels), overhead_us, is_nested=self.is_nested)


class Timeable(Protocol):
    """A graph whose calls can be timed."""

    def watched(self, watch: Watch) -> AbstractContextManager[None]:
        """Have its calls run by the watch."""
        ...

    def profile(self, watch: Watch) -> Profile | None:
        """Its kernels' times as the watch has seen them; None if no call ran it."""
        ...

    def tell(self, profile: Profile | None) -> None:
        """Tell its plan anew, with its profile."""
        ...


class PlannedGraph:
    """A graph by what runs its plan."""

    def __init__(self, graph: HybridGraph) -> None:
        self._graph = graph

    def watched(self, watch: Watch) -> AbstractContextManager[None]:
        return self._graph.timed_by(
            lambda run: lambda inputs: watch.run(lambda: run(inputs), lambda: run.timed(inputs))
        )

    def profile(self, watch: Watch) -> Profile | None:
        return watch.profile(_kernel_times(watch, self._graph.assignment)) if watch.labels else None

    def tell(self, profile: Profile | None) -> None:
        self._graph.tell(profile)


class WholeGraph:
    """A graph whose calls are eager's, by Dynamo's graph."""

    def __init__(self, call: PricedCall, module: torch.fx.GraphModule) -> None:
        self._call = call
        self._module = module
        self._works: dict[str, Work] = {}

    def watched(self, watch: Watch) -> AbstractContextManager[None]:
        return self._call.eager_timed_by(
            lambda run: lambda *inputs: watch.run(lambda: run(*inputs), lambda: self._run(inputs))
        )

    def _run(self, inputs: Sequence[Any]) -> tuple[Any, Sequence[StepTime]]:
        if not self._works:
            counted = _Counted(self._module)
            counted.run(*inputs)
            self._works = counted.works
        clocked = _Clocked(self._module)
        return clocked.run(*inputs), clocked.times

    def profile(self, watch: Watch) -> Profile | None:
        rows = [
            _row(kernel, kernel.label.partition(" ")[2], watch.us(kernel), self._works[kernel.label.partition(" ")[0]])
            for kernel in watch.labels
        ]
        return watch.profile(rows)

    def tell(self, profile: Profile | None) -> None:
        self._call.take_profile(profile)  # the planned graph tells it


class _Clocked(torch.fx.Interpreter):
    """Dynamo's graph, operator by operator, with the time of each."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.times: list[StepTime] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not callable(n.target) and n.op != "call_method":
            return getattr(self, n.op)(n.target, args, kwargs)
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
        call, *given = (n.target, *args) if callable(n.target) else (getattr(args[0], n.target), *args[1:])
        start = time.perf_counter_ns()
        outputs = call(*given, **kwargs)
        spent = time.perf_counter_ns() - start
        self.times.append(StepTime((StepOrigin("", f"{n.name} {name}"),), spent))
        return outputs


class _Counted(torch.fx.Interpreter):
    """The same with what each operator needs, in a run of its own: counting takes longer than most operators."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.works: dict[str, Work] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with FlopCounterMode(display=False) as counter:
            outputs = getattr(self, n.op)(n.target, args, kwargs)
        given, made = (
            [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)] for value in ((args, kwargs), outputs)
        )
        floats = [value for value in made if value.is_floating_point()]
        module = module_call(n).partition("@")[0]
        self.works[n.name] = Work(
            (n.name,),
            (module,) if module else (),
            source_line(n),
            counter.get_total_flops(),
            sum(map(value_bytes, (*given, *made))),
            str(floats[0].dtype).removeprefix("torch.") if floats else "",
        )
        return outputs


def _kernel_times(watch: Watch, assignment: Assignment) -> list[KernelTime]:
    """A row for each kernel, and for each segment of eager, in the order of a call."""
    regions = {segment.region.name: segment.region for segment in assignment.partition.graph.segments}
    rows = []
    for name in dict.fromkeys(kernel.region for kernel in watch.labels):
        graph, decision = regions[name].graph_module.graph, assignment.decisions.get(name)
        engine = EAGER if decision is None else decision.engine
        kernels = [kernel for kernel in watch.labels if kernel.region == name]
        works = dict(zip(kernels, kernel_work(graph, [kernel.nodes for kernel in kernels]), strict=True))
        if not any(kernel.nodes or kernel.label for kernel in kernels):  # the region is run as a whole
            whole = eager_work(graph) if engine == EAGER else kernel_work(graph, [set(regions[name].node_names)])[0]
            works = dict.fromkeys(kernels, whole)
        rows += [_row(kernel, watch.labels[kernel] or engine, watch.us(kernel), works[kernel]) for kernel in kernels]
    return rows


def _row(kernel: _Kernel, name: str, us: float, work: Work) -> KernelTime:
    return KernelTime(
        kernel.region, name, work.nodes, work.modules, work.source, us, work.flops, work.bytes, work.precision
    )


class Turns:
    """Turns that calls take: as a whole, or step by step. `depth`: how many graphs are running one inside another."""

    def __init__(self) -> None:
        self.by_step = False
        self.depth = 0


def warm_up(call: Callable[[], object], graphs: Sequence[Timeable]) -> None:
    """Call the model until a call compiles nothing, so adds nothing to `graphs`. A model that counts its calls is compiled several times."""
    for number in range(_MOST_WARMUP_CALLS):
        known = len(graphs)
        call()
        if number and len(graphs) == known:
            break


def profile_calls(call: Callable[[], object], graphs: Sequence[Timeable], session: Session) -> float:
    """Time calls of a model that is warm, and have each of its graphs tell its plan anew, with its profile.

    Returns the median microseconds of a call."""
    turns = Turns()
    watches = [Watch(turns) for _ in graphs]
    spent: list[int] = []
    load = OtherLoad()
    with contextlib.ExitStack() as stack:
        for graph, watch in zip(graphs, watches, strict=True):
            stack.enter_context(graph.watched(watch))
        begin = time.perf_counter()
        while len(spent) < _LEAST_ROUNDS or (len(spent) < _MOST_ROUNDS and time.perf_counter() - begin < _BUDGET_S):
            for turns.by_step in (False, True):
                start = time.perf_counter_ns()
                call()
                if not turns.by_step:
                    spent.append(time.perf_counter_ns() - start)
                for watch in watches:
                    watch.end_call()
    is_disturbed = load.is_felt()
    profiles = [graph.profile(watch) for graph, watch in zip(graphs, watches, strict=True)]
    precisions = {kernel.precision for profile in profiles if profile for kernel in profile.kernels if kernel.flops}
    ceilings = _ceilings(precisions, session)
    for graph, found in zip(graphs, profiles, strict=True):
        graph.tell(found and dataclasses.replace(found, ceilings=ceilings, is_disturbed=is_disturbed))
    return statistics.median(spent) / 1e3


def _ceilings(precisions: AbstractSet[str], session: Session) -> Ceilings | None:
    """The machine's ceilings for these precisions: as kept, or measured now; None if no engine here can measure them.

    They are kept as times, the microseconds of a billion operations or bytes: of times beside other load the shortest count.
    """
    if not any(engine.name == "tvm" and engine.available() for engine in session.engines):
        return None
    from torch_hybrid_backend.engines.cpu.ceilings import MEMORY, rates  # heavy

    timings, threads = session.services.timings, torch.get_num_threads()
    wanted = [MEMORY, *(name for name in _PRECISIONS if name in precisions)]
    kept: Mapping[str, float] = timings.get(_CEILINGS, str(threads), CPU)
    if missing := [name for name in wanted if name not in kept]:
        load = OtherLoad()
        with Progress("measuring the machine"):
            measured = rates(session.services.run_program, threads, missing)
        kept = {**kept, **{name: 1e6 / rate for name, rate in measured.items()}}
        timings.put(_CEILINGS, str(threads), CPU, kept, is_disturbed=load.is_felt())
    gflops = tuple((name, 1e6 / kept[name]) for name in _PRECISIONS if name in kept and name in precisions)
    return Ceilings(threads, gflops, 1e6 / kept[MEMORY])
