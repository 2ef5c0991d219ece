"""The accuracy check of a precision: in its first call, a graph of reduced precision is compared with itself as written. Part of the wiring.

    bf16: outputs off by 0.31, at most 0.02 may be      linear_7, whose own error is the largest, returns to float32
    compiled anew without it: off by 0.004              that is what runs from now on; one warning names linear_7

Kernels are compared apart, with eager's results for the same casts (`partition.accuracy`). A graph that cannot be run twice unnoticed is not
compared.

Zeros, padding and empty inputs show no error. A layer that saw nothing else has not been checked yet. So the graph is compared once more, in a
later call whose inputs do vary:

    first call, on zeros: off by 0                      `explain` names the layers whose error is not known yet
    a later call, on an image: off by 0.31              linear_7 returns to float32, as above
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.fx

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import Segment
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.driver.prepared import Prepared, Reduced, prepare_anew, returned
from torch_hybrid_backend.driver.stages import Assignment, Place
from torch_hybrid_backend.errors import OperatorRefusedError, failures, is_out_of_memory
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.graph.precision import is_cast
from torch_hybrid_backend.graph.source import source_line
from torch_hybrid_backend.graph.values import is_repeatable
from torch_hybrid_backend.partition.deviation import (
    WrittenRun,
    any_telling,
    changing_inputs,
    layer_errors,
    relative_error,
)

_log = logging.getLogger(__name__)
# Layers that the warning names.
_NAMED = 8

# The faster of a placed graph, whose outputs are given, and of others with more layers as written.
Faster = Callable[[Assignment, list[Any]], tuple[Assignment, list[Any]]]


def check_accuracy(
    assignment: Assignment, outputs: list[Any], inputs: Sequence[Any], config: Config, place_anew: Place, faster: Faster
) -> tuple[Assignment, list[Any]]:
    """The graph with its errors known, and its outputs for `inputs`: as they are where they are near enough to those of the graph as written.

    Else the fewest layers return to it that make them so, those first whose own errors are the largest; one WARNING names them. What is left of
    the precision then may no longer be worth its casts: `faster` tells.
    """
    reduced = assignment.prepared.reduced
    if reduced is None:
        return assignment, outputs
    if why := _not_compared(reduced, config):
        return _let_go(assignment, why), outputs
    deviation = _deviation_if_possible(assignment, reduced, inputs)
    if isinstance(deviation, str):
        return _let_go(assignment, deviation), outputs
    assert assignment.prepared.conversion is not None
    if deviation.error > assignment.prepared.conversion.tolerance:
        assignment, outputs, deviation = _within_tolerance(
            assignment.prepared, reduced, deviation, inputs, config, place_anew
        )
        anew, results = faster(assignment, outputs)
        if anew is not assignment:
            if anew.prepared.reduced is None:  # all of it is as written
                return _let_go(anew), results
            again = _deviation(anew, anew.prepared.reduced, inputs)
            if again.error <= deviation.error:  # errors fall with each layer that returns, but for chance
                assignment, outputs, deviation = anew, results, again
    return _with_errors(assignment, deviation), outputs


def check_accuracy_again(assignment: Assignment, inputs: Sequence[Any]) -> Assignment | None:
    """The graph with what one more call shows of its errors; None if its outputs are off by more than the tolerance."""
    reduced, conversion = assignment.prepared.reduced, assignment.prepared.conversion
    assert reduced is not None
    assert conversion is not None
    deviation = _deviation_if_possible(assignment, reduced, inputs)
    if isinstance(deviation, str):
        return _let_go(assignment, deviation)
    if deviation.error > conversion.tolerance:
        return None
    return _with_errors(assignment, deviation)


class LaterAccuracyCheck:
    """Runs calls as before until one tells something of layers that earlier ones told nothing of; that call is compared first."""

    def __init__(self, graph: CheckedGraph, attempt: int, run: Callable[[Sequence[Any]], list[Any]]) -> None:
        """graph: held weakly. attempt: how often its calls were compared; the more often, the more calls go by before the next."""
        self.run = run
        self._graph = weakref.ref(graph)
        self._left = 2 ** (attempt - 1)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        graph = self._graph()
        if graph is None or not graph.varies(inputs):
            return self.run(inputs)
        self._left -= 1
        if self._left > 0 or not graph.without_next_call(self):
            return self.run(inputs)
        graph.check_again(inputs)
        return graph(list(inputs))


class CheckedGraph(Protocol):
    """A graph that can be compared with itself as written once more."""

    def __call__(self, inputs: list[Any]) -> list[Any]: ...

    def varies(self, inputs: Sequence[Any]) -> bool:
        """True if a call's inputs, parameters apart, tell something of its errors."""
        ...

    def without_next_call(self, next_call: Any) -> bool:
        """Put back what `next_call` stands in for; False if another thread has."""
        ...

    def check_again(self, inputs: Sequence[Any]) -> None:
        """Compare a call with the graph as written, and let layers return that are off."""
        ...


def _not_compared(reduced: Reduced, config: Config) -> str:
    if config.verify == "off":
        return "verify=off"
    if not is_repeatable(reduced.written):
        return "a call cannot be repeated unnoticed: it draws random numbers, or calls operators of which that is not known"
    return ""


def _let_go(assignment: Assignment, unchecked: str = "") -> Assignment:
    """Without the graph as written, which later calls have no use for."""
    conversion = assignment.prepared.conversion
    assert conversion is not None
    conversion = dataclasses.replace(conversion, unchecked=unchecked)
    return dataclasses.replace(
        assignment, prepared=dataclasses.replace(assignment.prepared, reduced=None, conversion=conversion)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Deviation:
    """Errors of a placed graph's outputs and of its regions' (by name), the outputs as written, and the layers that it tells nothing of."""

    error: float
    regions: Mapping[str, float]
    expected: Sequence[Any]
    unseen: frozenset[str]


def _within_tolerance(
    prepared: Prepared,
    reduced: Reduced,
    deviation: _Deviation,
    inputs: Sequence[Any],
    config: Config,
    place_anew: Place,
) -> tuple[Assignment, list[Any], _Deviation]:
    """The graph with as many layers as written as it takes, and its outputs and errors. `found`: those of all of them converted."""
    assert prepared.conversion is not None
    tolerance, expected = prepared.conversion.tolerance, deviation.expected
    off = f"in {prepared.conversion.precision} the outputs are off by {deviation.error:.2g}, at most {tolerance:.2g} may be"
    order = _worst_first(reduced, inputs)

    def without(count: int) -> Reduced:
        """The graph with the worst layers as written."""
        why = {
            name: Refused(Reason.ACCURACY, f"{off}; its own results by {error:.2g}") for name, error in order[:count]
        }
        return returned(reduced, why)

    @functools.cache
    def error_in_eager(count: int) -> float:
        if count == len(order):
            return 0.0
        try:
            return _error(expected, EagerGraph(without(count).graph)(inputs))
        except failures(RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return math.inf

    count, limit = 0, tolerance
    while True:
        # Errors fall with each layer that returns, but for chance: so few runs find how many must.
        returning = range(count + 1, len(order) + 1)
        count = returning[bisect.bisect_left(returning[:-1], True, key=lambda n: error_in_eager(n) <= limit)]
        anew = without(count)
        assignment, outputs = place_anew(prepare_anew(prepared, anew, config))
        deviation = _deviation(assignment, anew, inputs)
        if deviation.error <= tolerance or count >= len(order):
            break
        limit *= (
            tolerance / deviation.error
        )  # kernels are off by more than eager: each graph that is compiled aims lower
    _warn(reduced, [name for name, _ in order[:count]], off)
    return assignment, outputs, deviation


def _deviation_if_possible(assignment: Assignment, reduced: Reduced, inputs: Sequence[Any]) -> _Deviation | str:
    """The errors of a call, or why the graph as written cannot be run beside it."""
    try:
        return _deviation(assignment, reduced, inputs)
    except OperatorRefusedError as error:
        return f"PyTorch cannot run it as written: {error}"
    except failures(RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "there is no memory to run it as written too"


def _deviation(assignment: Assignment, reduced: Reduced, inputs: Sequence[Any]) -> _Deviation:
    runs = assignment.runs
    segments = assignment.partition.graph.segments
    uncast = _uncast(reduced.graph)
    names = {name: uncast.get(name, name) for segment in segments for name in segment.outputs}
    layers = reduced.converted_layers
    changing = changing_inputs(reduced.written, reduced.context.constants)
    written = WrittenRun(reduced.written, inputs, names.values(), {name: changing[name] for name in layers})
    regions: dict[str, float] = {}

    def compared(index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
        results = runs[index](arguments)
        for name, result in zip(segment.outputs, results, strict=True):
            error = relative_error(written.value(names[name]), result)
            if error is not None:
                regions[segment.region.name] = max(error, regions.get(segment.region.name, 0.0))
        return results

    outputs = assignment.python_executor().run(inputs, compared)
    expected = written.outputs()
    placeholders = reduced.written.graph.find_nodes(op="placeholder")
    given = [
        value for node, value in zip(placeholders, inputs, strict=True) if node.name not in reduced.context.constants
    ]
    unseen = frozenset(written.unseen) if any_telling(given) else layers
    return _Deviation(_error(expected, outputs), regions, expected, unseen)


def _uncast(graph: torch.fx.GraphModule) -> Mapping[str, str]:
    """Names of casts -> those of what they cast, which the graph as written has too."""
    names: dict[str, str] = {}
    for node in graph.graph.nodes:
        if is_cast(node):
            source = node.all_input_nodes[0].name
            names[node.name] = names.get(source, source)
    return names


def _error(expected: Sequence[Any], outputs: Sequence[Any]) -> float:
    return relative_error(list(expected), list(outputs)) or 0.0


def _worst_first(reduced: Reduced, inputs: Sequence[Any]) -> list[tuple[str, float]]:
    errors = layer_errors(reduced.written, reduced.graph, reduced.converted_layers, inputs)
    return sorted(errors.items(), key=lambda item: -item[1])


def _with_errors(assignment: Assignment, deviation: _Deviation) -> Assignment:
    """The graph with the errors of one more call. It keeps the graph as written if layers remain that no call has told of."""
    decisions = {
        name: dataclasses.replace(
            decision, precision_error=_larger(decision.precision_error, deviation.regions.get(name))
        )
        for name, decision in assignment.decisions.items()
    }
    conversion = assignment.prepared.conversion
    assert conversion is not None
    unseen = deviation.unseen if conversion.error is None else deviation.unseen.intersection(conversion.unseen)
    conversion = dataclasses.replace(
        conversion, error=_larger(conversion.error, deviation.error), unseen=tuple(sorted(unseen))
    )
    reduced = assignment.prepared.reduced if unseen else None
    prepared = dataclasses.replace(assignment.prepared, conversion=conversion, reduced=reduced)
    return dataclasses.replace(assignment, decisions=decisions, prepared=prepared)


def _larger(one: float | None, other: float | None) -> float | None:
    return max((error for error in (one, other) if error is not None), default=None)


def _warn(reduced: Reduced, returned: Sequence[str], off: str) -> None:
    lines = {node.name: source_line(node) for node in reduced.written.graph.nodes}
    named = ", ".join(f"{name} ({lines[name]})" if lines[name] else name for name in returned[:_NAMED])
    more = f" and {len(returned) - _NAMED} more, which explain() lists" if len(returned) > _NAMED else ""
    _log.warning("%s (precision_tolerance): these layers are computed as written from now on: %s%s", off, named, more)
