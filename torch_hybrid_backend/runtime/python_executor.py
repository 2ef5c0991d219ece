"""The executor in plain Python: the first call, graphs with collectives, sizes that depend on data, and the oracle of the C++ executor's
tests.

Enters: a `PartitionedGraph` and what each segment compiled to. Leaves: a callable from a list of inputs to the list of the
graph's outputs, with the semantics of `Executor` and no demands on specs: sizes may be symbolic, values may be numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torch_hybrid_backend.core.hoisted_inputs import FoldedValue, HoistedInputs
from torch_hybrid_backend.core.lazy_bits import copied
from torch_hybrid_backend.core.region import PartitionedGraph, Segment
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.graph.eager_graph import with_strides
from torch_hybrid_backend.runtime.constants import Fold, LiveConstants, main_inputs, run_fold, without_owning
from torch_hybrid_backend.runtime.executor import CompiledSegment, StepTime, static_dims
from torch_hybrid_backend.runtime.plan_layout import StepOrigin
from torch_hybrid_backend.torch_private import profiler_enabled

# Runs one segment in place of the executor: (position, segment, its inputs) -> its outputs.
OnSegment = Callable[[int, Segment, Sequence[Any]], Sequence[Any]]


class PythonExecutor:
    """Runs one partitioned graph segment by segment. Threads may call it at once.

    hoisted, fold: as in `Executor`; titles: what profilers show for each segment. Folded values are kept while the
    parameters they come from stay as they are.
    """

    def __init__(
        self,
        graph: PartitionedGraph,
        segments: Sequence[CompiledSegment],
        hoisted: HoistedInputs | None = None,
        fold: Fold | None = None,
        titles: Sequence[str] = (),
    ) -> None:
        self._graph = graph
        self._titles = tuple(titles) or ("",) * len(segments)
        self._segments = tuple(segments)
        self._hoisted = hoisted if hoisted is not None else HoistedInputs.identity(len(graph.inputs))
        self._dying = _dying_after(graph)
        sources = zip(graph.inputs, self._hoisted.main, strict=True)
        self._folded_names = frozenset(name for name, source in sources if isinstance(source, FoldedValue))
        positions = self._hoisted.fold
        source_of = self._hoisted
        self._folded = LiveConstants(
            positions,
            positions,
            lambda inputs, _: without_owning(run_fold(source_of, fold, inputs), source_of, inputs),
        )

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's outputs; tensors have the strides of their static specs."""
        return self.run(inputs)

    def bind(self, inputs: Sequence[Any]) -> None:
        """Folds the constants among a call's inputs now, not in that call."""
        with torch.no_grad():
            self._folded.compared(inputs)

    def timed(self, inputs: Sequence[Any]) -> tuple[list[Any], list[StepTime]]:
        """Outputs and times as of `Executor.timed`; a segment is one step."""
        times: list[StepTime] = []

        def on_segment(index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
            start = time.perf_counter_ns()
            outputs = self._segments[index](arguments)
            times.append(StepTime((StepOrigin(segment.region.name),), time.perf_counter_ns() - start))
            return outputs

        return self.run(inputs, on_segment), times

    def run(self, inputs: Sequence[Any], on_segment: OnSegment | None = None) -> list[Any]:
        """Make a call in which every segment is run by `on_segment` where it is given (to verify and time it, say).

        Raises HybridError for a wrong number of inputs or outputs and for outputs that do not fit their specs.
        """
        with torch.no_grad():
            folded = self._folded.compared(inputs) if self._folded_names else []
            main = main_inputs(self._hoisted, folded, inputs)
            values: dict[str, Any] = dict(zip(self._graph.inputs, main, strict=True))
            for index, segment in enumerate(self._graph.segments):
                arguments = [values[name] for name in segment.inputs]
                run = self._segments[index]
                with _profiled(self._titles[index]):
                    results = on_segment(index, segment, arguments) if on_segment else run(arguments)
                del arguments
                values.update(zip(segment.outputs, checked(segment, results), strict=True))
                for name in self._dying[index]:
                    del values[name]
            return [self._output(output, values) for output in self._graph.outputs]

    def _output(self, output: object, values: dict[str, Any]) -> Any:
        if not isinstance(output, str):
            return output
        value = values[output]
        # A copy of what is kept, as eager would have computed it: the caller may write to it.
        return copied(value) if output in self._folded_names else value


def _profiled(title: str) -> AbstractContextManager[object]:
    """A range in the timeline of a profiler, where one watches this thread."""
    if title and profiler_enabled():
        return torch.profiler.record_function(title)
    return nullcontext()


def _dying_after(graph: PartitionedGraph) -> list[list[str]]:
    """For each segment, the values that no later segment reads and the graph does not return."""
    returned = {output for output in graph.outputs if isinstance(output, str)}
    last: dict[str, int] = {}
    for index, segment in enumerate(graph.segments):
        for name in (*segment.inputs, *segment.outputs):
            last[name] = index
    dying: list[list[str]] = [[] for _ in graph.segments]
    for name, index in last.items():
        if name not in returned:
            dying[index].append(name)
    return dying


def checked(segment: Segment, results: Sequence[Any]) -> list[Any]:
    """A segment's results with the strides of their static specs. Raises HybridError where they do not fit."""
    if len(results) != len(segment.outputs):
        raise HybridError(
            f"region {segment.region.name} returned {len(results)} values instead of {len(segment.outputs)}"
        )
    return [
        _conform(segment, result, spec) if spec is not None and spec.is_static else result
        for result, spec in zip(results, segment.region.outputs, strict=True)
    ]


def _conform(segment: Segment, result: Any, spec: TensorSpec) -> Any:
    if not isinstance(result, torch.Tensor):
        raise HybridError(f"region {segment.region.name} returned {result!r} instead of a tensor of {spec}")
    if tuple(result.shape) != spec.shape or result.dtype != spec.torch_dtype:
        raise HybridError(f"region {segment.region.name} returned {TensorSpec.of(result)} instead of {spec}")
    return result if result.layout is not torch.strided else with_strides(result, static_dims(spec.strides))
