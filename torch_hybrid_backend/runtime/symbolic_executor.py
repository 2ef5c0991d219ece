"""The fast path of a graph whose sizes are only known at run time: one C++ plan for each set of sizes met.

The kernels take the sizes as arguments and are the same for all; a plan is their order, the memory between them and those arguments,
laid out when a set of sizes is first seen. Packed constants are shared. Plans that were not used for long go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_hybrid_backend.core.hoisted_inputs import CallInput, HoistedInputs
from torch_hybrid_backend.core.program import Program
from torch_hybrid_backend.core.region import PartitionedGraph, Segment
from torch_hybrid_backend.core.size_reader import SizeReader
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.constants import Fold
from torch_hybrid_backend.runtime.executor import CompiledSegment, Executor, StepTime
from torch_hybrid_backend.runtime.kept_plans import KeptPlans, Run, Sizes
from torch_hybrid_backend.runtime.plan_layout import Piece, StaticLayoutError
from torch_hybrid_backend.runtime.python_executor import PythonExecutor
from torch_hybrid_backend.sizes.size import Dim, evaluate, symbols

log = logging.getLogger(__name__)

SizeRange = tuple[str, int, int]  # as in `Program.ranges`: the name of a size, its least and its most


class SymbolicExecutor:
    """Runs one graph at any sizes. Threads may call it at once.

    segments[i] is what `graph.segments[i]` compiled to, titles[i] what profilers show for it. At sizes that its program does not serve its
    `otherwise` runs the segment: that is decided where a plan is made, and costs calls nothing. hoisted, fold, graphs: as in `Executor`; each
    set of sizes has CUDA graphs of its own.
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

    def is_within(self, ranges: Sequence[SizeRange], inputs: Sequence[Any]) -> bool:
        """True if a call's sizes lie in all of these ranges."""
        values = self._reader.values(inputs)
        return all(least <= values.get(name, least) <= most for name, least, most in ranges)

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
        values = self._values(sizes)
        try:
            return self._executor_at(values)
        except StaticLayoutError as error:
            log.info("at the sizes %s this graph runs in eager: %s", values, error)
            eager = [segment.region.eager for segment in self._graph.segments]
            return PythonExecutor(self._graph, eager, self._hoisted, self._fold, self._titles)

    def _values(self, sizes: Sizes) -> Mapping[str, int]:
        return dict(zip(self._reader.names, sizes, strict=True))

    def _runs_at(self, values: Mapping[str, int]) -> list[CompiledSegment]:
        """Callables that run the segments at these sizes."""
        return [
            _run_at(segment, run, values) for segment, run in zip(self._graph.segments, self._segments, strict=True)
        ]

    def _executor_at(self, values: Mapping[str, int]) -> Executor:
        graph = self._graph
        sizes = {name: evaluate(size, values) for name, size in graph.sizes.items()}
        runs = self._runs_at(values)
        pieces: list[Piece] = []
        callbacks: list[Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]] = []
        for segment, compiled, title in zip(graph.segments, runs, self._titles, strict=True):
            if segment.outputs and all(name in sizes for name in segment.outputs) and _computes_sizes(segment):
                continue
            pieces.append(_piece_at(segment, getattr(compiled, "program", None), sizes, values, title))
            callbacks.append(_callback_at(segment, compiled, sizes))
        outputs = tuple(sizes.get(output, output) if isinstance(output, str) else output for output in graph.outputs)
        # Others pack other constants.
        alike = (run for at, run in reversed(self._plans.items()) if self._runs_at(self._values(at)) == runs)
        like = next((run for run in alike if isinstance(run, Executor)), None)
        return Executor(
            graph.inputs,
            graph.constants,
            pieces,
            callbacks,
            outputs,
            self._hoisted,
            self._fold,
            like,
            graphs=self._graphs,
        )


def _run_at(segment: Segment, compiled: CompiledSegment, values: Mapping[str, int]) -> CompiledSegment:
    program = getattr(compiled, "program", None)
    if program is None or program.serves(values):
        return compiled
    return getattr(compiled, "otherwise", None) or segment.region.eager


def concrete_program(program: Program, values: Mapping[str, int]) -> Program:
    """The program at given sizes. Raises StaticLayoutError for sizes that it does not serve."""
    if unserved := program.unserved(values):
        raise StaticLayoutError(f"a program does not serve these sizes: {unserved}")
    return program.at(values)


def _piece_at(
    segment: Segment, program: Program | None, sizes: Mapping[str, int], values: Mapping[str, int], title: str
) -> Piece:
    """The segment's piece of the plan at given sizes; its size inputs and outputs are no values of the plan."""
    region = segment.region
    kept = [i for i, name in enumerate(segment.inputs) if name not in sizes]
    made = [i for i, name in enumerate(segment.outputs) if name not in sizes]
    if program is not None:
        program = concrete_program(program.reading(kept), values)
    return Piece(
        tuple(segment.inputs[i] for i in kept),
        tuple(_at(region.inputs[i].spec, values) for i in kept),
        tuple(segment.outputs[i] for i in made),
        tuple(_at(region.outputs[i], values) for i in made),
        program,
        title,
        region.name,
    )


def _at(spec: TensorSpec | None, values: Mapping[str, int]) -> TensorSpec | None:
    try:
        return None if spec is None else spec.at(values)
    except KeyError as missing:
        raise StaticLayoutError(f"the size {missing} depends on data") from missing


def _callback_at(
    segment: Segment, compiled: CompiledSegment, sizes: Mapping[str, int]
) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    run: Callable[[Sequence[Any]], Sequence[Any]] = compiled
    if not any(name in sizes for name in (*segment.inputs, *segment.outputs)):
        return run
    given = [sizes.get(name) for name in segment.inputs]
    kept = [i for i, name in enumerate(segment.outputs) if name not in sizes]

    def call(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        rest = iter(tensors)
        results = run([next(rest) if size is None else size for size in given])
        return [results[i] for i in kept]

    return call


def _computes_sizes(segment: Segment) -> bool:
    nodes = segment.region.graph_module.graph.nodes
    return all(
        isinstance(n.meta.get("val"), int | torch.SymInt) for n in nodes if n.op not in ("placeholder", "output")
    )
