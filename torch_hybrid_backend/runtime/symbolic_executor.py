"""The fast path of a graph whose sizes are only known at run time: one C++ plan for each set of sizes met.

The kernels take the sizes as arguments and are the same for all; a plan is their order, the memory between them and those arguments. The graph
is laid out once, on its symbols; C++ makes the plan of that when a set of sizes is first seen (csrc/include/plan_template.h). Packed constants
are shared. Plans that were not used for long go.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend.core.hoisted_inputs import CallInput, HoistedInputs
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import PartitionedGraph, Segment
from torch_hybrid_backend.core.size_reader import SizeReader
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.constants import Fold
from torch_hybrid_backend.runtime.executor import CompiledSegment, Executor, GraphPlans, SavedPlan, StepTime
from torch_hybrid_backend.runtime.kept_plans import KeptPlans, Run, Sizes
from torch_hybrid_backend.runtime.native.ops import Callback
from torch_hybrid_backend.runtime.offload import OffloadedWeights
from torch_hybrid_backend.runtime.plan_layout import AtSizes, Piece, StaticLayoutError
from torch_hybrid_backend.runtime.python_executor import PythonExecutor
from torch_hybrid_backend.runtime.served_sizes import Limit, ServedSizes, limits
from torch_hybrid_backend.sizes.size import Dim, evaluate, symbols

log = logging.getLogger(__name__)

SizeRange = tuple[str, int, int]  # as in `Program.ranges`: the name of a size, its least and its most


class SymbolicExecutor:
    """Runs one graph at any sizes. Threads may call it at once.

    segments[i] is what `graph.segments[i]` compiled to, titles[i] what profilers show for it. At sizes that its program does not serve its
    `otherwise` runs the segment: that is decided where a plan is made, and costs calls nothing; the graph is laid out once for each
    such choice. hoisted, fold, graphs: as in `GraphPlans`; each set of sizes has CUDA graphs of its own.
    Raises StaticLayoutError where the sizes cannot be told from the inputs (they depend on data).
    """

    def __init__(
        self,
        graph: PartitionedGraph,
        segments: Sequence[CompiledSegment],
        hoisted: HoistedInputs | None = None,
        fold: Fold | None = None,
        titles: Sequence[str] = (),
        *,
        graphs: bool = False,
    ) -> None:
        self._graph = graph
        self._titles = tuple(titles) or ("",) * len(segments)
        self._segments = tuple(segments)
        self._hoisted = hoisted if hoisted is not None else HoistedInputs.identity(len(graph.inputs))
        self._fold = fold
        self._graphs = graphs
        self._reader = self._find_sizes()
        programs = [getattr(compiled, "program", None) for compiled in segments]
        self._ranged = [i for i, program in enumerate(programs) if program is not None and program.names]
        self._served = ServedSizes([program for program in programs if program and program.names], self._reader.names)
        self._laid_out: dict[frozenset[int], GraphPlans | str] = {}  # by the segments that others run; or why not
        self._plans: KeptPlans[Run] = KeptPlans()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's outputs at this call's sizes. Raises as `Executor` does."""
        return self._plan_for(inputs)(inputs)

    def timed(self, inputs: Sequence[Any]) -> tuple[list[Any], list[StepTime]]:
        """Outputs and times as of `Executor.timed`, at this call's sizes."""
        run = self._plan_for(inputs)
        assert isinstance(run, Executor | PythonExecutor)
        return run.timed(inputs)

    def bind(self, inputs: Sequence[Any]) -> None:
        """Makes the plan for a call's sizes, and its constants, now, not in that call. Raises as a call does."""
        run = self._plan_for(inputs)
        if isinstance(run, Executor):
            run.bind(inputs)

    def offload(self, inputs: Sequence[Any], folder: Path) -> OffloadedWeights:
        """Move constants to a file as `Executor.offload` does, by the plan for a call's sizes."""
        run = self._plan_for(inputs)
        return run.offload(inputs, folder) if isinstance(run, Executor) else OffloadedWeights(())

    def is_within(self, ranges: Sequence[SizeRange], inputs: Sequence[Any]) -> bool:
        """True if a call's sizes lie in all of these ranges."""
        values = self._reader.values(inputs)
        return all(least <= values.get(name, least) <= most for name, least, most in ranges)

    def saved(self, inputs: Sequence[Any]) -> tuple[SavedPlan, tuple[Limit, ...]]:
        """The plans of all sizes as data, made of what serves a call's, and the sizes that limit what it serves.

        Raises StaticLayoutError where it serves none.
        """
        sizes = self._reader.read(inputs)
        run = self._plan_for(inputs)
        others = self._others(sizes)
        if not isinstance(run, Executor):
            raise StaticLayoutError(f"the graph runs in eager, because {self._laid_out[others]}")
        runs = [self._run_of(number, others) for number in range(len(self._segments))]
        programs = [program for run in runs if (program := getattr(run, "program", None)) is not None]
        return run.saved(inputs), tuple(limit for program in programs for limit in limits(program))

    def _others(self, sizes: Sizes) -> frozenset[int]:
        """Numbers of the segments whose programs do not serve these sizes."""
        return frozenset(i for i, serves in zip(self._ranged, self._served.at(sizes), strict=True) if not serves)

    def _run_of(self, number: int, others: AbstractSet[int]) -> CompiledSegment:
        compiled, segment = self._segments[number], self._graph.segments[number]
        return (getattr(compiled, "otherwise", None) or segment.region.eager) if number in others else compiled

    def _plan_for(self, inputs: Sequence[Any]) -> Run:
        return self._plans.at(self._reader.read(inputs), self._made)

    @property
    def plans(self) -> int:
        """Number of sets of sizes that have a plan."""
        return len(self._plans)

    @property
    def cuda_graphs(self) -> tuple[tuple[str, ...], ...]:
        """CUDA graphs as in `Executor`, of the plan that was not used for longest of those that there are."""
        return next((run.cuda_graphs for _, run in self._plans.items() if isinstance(run, Executor)), ())

    def _find_sizes(self) -> SizeReader:
        """Reader of the sizes in the graph's specs, from the call's inputs."""
        described: dict[str, TensorSpec | Dim | None] = dict(self._graph.sizes)
        used: list[Dim] = list(self._graph.sizes.values())
        for segment in self._graph.segments:
            for name, region_input in zip(segment.inputs, segment.region.inputs, strict=True):
                if region_input.spec is not None:
                    described.setdefault(name, region_input.spec)
            for spec in (*(i.spec for i in segment.region.inputs), *segment.region.outputs):
                if spec is not None:
                    used += (*spec.shape, *spec.strides)
        call: list[TensorSpec | Dim | None] = []
        for name, source in zip(self._graph.inputs, self._hoisted.main, strict=True):
            if isinstance(source, CallInput):
                call += [None] * (source.position + 1 - len(call))
                call[source.position] = described.get(name)
        try:
            return SizeReader(call, [symbol.name for symbol in symbols(used)])
        except HybridError as error:
            raise StaticLayoutError(str(error)) from error

    def _made(self, sizes: Sizes) -> Run:
        others = self._others(sizes)
        laid_out = self._laid_out.get(others)
        if laid_out is None:
            laid_out = self._laid_out[others] = self._lay_out(others)
        values = dict(zip(self._reader.names, sizes, strict=True))
        if isinstance(laid_out, GraphPlans):
            return laid_out.at(values)
        log.info("at the sizes %s this graph runs in eager: %s", values, laid_out)
        eager = [segment.region.eager for segment in self._graph.segments]
        return PythonExecutor(self._graph, eager, self._hoisted, self._fold, self._titles)

    def _lay_out(self, others: AbstractSet[int]) -> GraphPlans | str:
        """The graph laid out, at sizes that the programs of these segments, by number, do not serve; or the reason why it cannot be."""
        graph, sizes = self._graph, self._graph.sizes
        pieces: list[Piece] = []
        callbacks: list[Callback | AtSizes] = []
        for number, (segment, title) in enumerate(zip(graph.segments, self._titles, strict=True)):
            if segment.outputs and all(name in sizes for name in segment.outputs) and _computes_sizes(segment):
                continue
            run = self._run_of(number, others)
            pieces.append(_piece(segment, getattr(run, "program", None), sizes, title))
            callbacks.append(_callback(segment, run, sizes))
        outputs = tuple(sizes.get(output, output) if isinstance(output, str) else output for output in graph.outputs)
        try:
            laid_out = GraphPlans(
                graph.inputs,
                graph.constants,
                pieces,
                callbacks,
                outputs,
                self._hoisted,
                self._fold,
                graphs=self._graphs,
            )
        except StaticLayoutError as error:
            return str(error)
        unknown = [symbol.name for symbol in laid_out.layout.symbols if symbol.name not in self._reader.names]
        return f"the sizes {', '.join(unknown)} depend on data" if unknown else laid_out


def _piece(segment: Segment, program: Program | None, sizes: Mapping[str, Dim], title: str) -> Piece:
    """The segment's piece of the plan; its size inputs and outputs are no values of the plan."""
    region = segment.region
    kept = [i for i, name in enumerate(segment.inputs) if name not in sizes]
    made = [i for i, name in enumerate(segment.outputs) if name not in sizes]
    return Piece(
        tuple(segment.inputs[i] for i in kept),
        tuple(region.inputs[i].spec for i in kept),
        tuple(segment.outputs[i] for i in made),
        tuple(region.outputs[i] for i in made),
        None if program is None else program.reading(kept),
        title,
        region.name,
    )


def _callback(segment: Segment, run: CompiledSegment, sizes: Mapping[str, Dim]) -> Callback | AtSizes:
    if not any(name in sizes for name in (*segment.inputs, *segment.outputs)):
        return run
    given = tuple(sizes.get(name) for name in segment.inputs)
    return WithSizes(run, given, tuple(i for i, name in enumerate(segment.outputs) if name not in sizes))


@dataclass(frozen=True, slots=True)
class WithSizes(AtSizes):
    """Runs a segment on a plan's tensors and on sizes. `given`: its inputs, None for a tensor; `kept`: its outputs that are tensors, by
    number."""

    run: CompiledSegment
    given: tuple[Dim | None, ...]
    kept: tuple[int, ...]

    def at(self, values: Mapping[str, int]) -> Callback:
        numbers = [None if size is None else evaluate(size, values) for size in self.given]

        def call(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            rest = iter(tensors)
            given: list[Any] = [next(rest) if number is None else number for number in numbers]
            results = self.run(given)
            return [results[i] for i in self.kept]

        return call


def _computes_sizes(segment: Segment) -> bool:
    nodes = segment.region.graph_module.graph.nodes
    return all(
        isinstance(n.meta.get("val"), int | torch.SymInt) for n in nodes if n.op not in ("placeholder", "output")
    )
