"""The model gate: in its first call, a graph of reduced precision is compared with itself as written. Part of the wiring.

    bf16: outputs off by 0.31, at most 0.02 may be      linear_7, whose own error is the largest, returns to float32
    compiled anew without it: off by 0.004              that is what runs from now on; one warning names linear_7

Kernels are judged apart, by eager with the same casts (`partition.accuracy`). What cannot be run twice unnoticed is not compared.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import Segment
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.eager_graph import EagerGraph
from torch_hybrid_backend.errors import OperatorRefusedError, failures, is_out_of_memory
from torch_hybrid_backend.graph.precision import converted_to, is_cast
from torch_hybrid_backend.graph.source import source_line
from torch_hybrid_backend.graph.values import is_repeatable
from torch_hybrid_backend.partition.deviation import WrittenRun, layer_errors, relative_error
from torch_hybrid_backend.passes.precision.lists import is_layer
from torch_hybrid_backend.prepared import Prepared, Reduced, prepare_anew, returned
from torch_hybrid_backend.stages import Placed

_log = logging.getLogger(__name__)
# Layers that the warning names.
_NAMED = 8

# Compiles a graph, and places it on the inputs of the call: with it the call's outputs.
Place = Callable[[Prepared], tuple[Placed, list[Any]]]
# The faster of a placed graph, whose outputs are given, and of others with more layers as written.
Faster = Callable[[Placed, list[Any]], tuple[Placed, list[Any]]]


def judged(
    placed: Placed, outputs: list[Any], inputs: Sequence[Any], config: Config, place_anew: Place, faster: Faster
) -> tuple[Placed, list[Any]]:
    """The graph with its errors known, and its outputs for `inputs`: as they are where they are near enough to those of the graph as written.

    Else the fewest layers return to it that make them so, those first whose own errors are the largest; one WARNING names them. What is left of
    the precision then may no longer be worth its casts: `faster` tells.
    """
    reduced = placed.prepared.reduced
    if reduced is None:
        return placed, outputs
    if why := _not_compared(reduced, config):
        return _let_go(placed, why), outputs
    try:
        found = _deviation(placed, reduced, inputs)
    except OperatorRefusedError as error:
        return _let_go(placed, f"PyTorch cannot run it as written: {error}"), outputs
    except failures(RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _let_go(placed, "there is no memory to run it as written too"), outputs
    assert placed.prepared.conversion is not None
    if found.error > placed.prepared.conversion.tolerance:
        placed, outputs, found = _within_tolerance(placed.prepared, reduced, found, inputs, config, place_anew)
        anew, results = faster(placed, outputs)
        if anew is not placed:
            if anew.prepared.reduced is None:  # all of it is as written
                return _let_go(anew), results
            again = _deviation(anew, anew.prepared.reduced, inputs)
            if again.error <= found.error:  # errors fall with each layer that returns, but for chance
                placed, outputs, found = anew, results, again
    return _let_go(_with_errors(placed, found)), outputs


def _not_compared(reduced: Reduced, config: Config) -> str:
    if config.verify == "off":
        return "verify=off"
    if not is_repeatable(reduced.written):
        return "a call cannot be repeated unnoticed: it draws random numbers, or calls operators of which that is not known"
    return ""


def _let_go(placed: Placed, unchecked: str = "") -> Placed:
    """Without the graph as written, which later calls have no use for."""
    conversion = placed.prepared.conversion
    assert conversion is not None
    conversion = dataclasses.replace(conversion, unchecked=unchecked)
    return dataclasses.replace(
        placed, prepared=dataclasses.replace(placed.prepared, reduced=None, conversion=conversion)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Deviation:
    """Errors of a placed graph's outputs and of its regions' (by name), and the outputs as written."""

    error: float
    regions: Mapping[str, float]
    expected: Sequence[Any]


def _within_tolerance(
    prepared: Prepared, reduced: Reduced, found: _Deviation, inputs: Sequence[Any], config: Config, place_anew: Place
) -> tuple[Placed, list[Any], _Deviation]:
    """The graph with as many layers as written as it takes, and its outputs and errors. `found`: those of all of them converted."""
    assert prepared.conversion is not None
    tolerance, expected = prepared.conversion.tolerance, found.expected
    off = f"in {prepared.conversion.precision} the outputs are off by {found.error:.2g}, at most {tolerance:.2g} may be"
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
        placed, outputs = place_anew(prepare_anew(prepared, anew, config))
        found = _deviation(placed, anew, inputs)
        if found.error <= tolerance or count >= len(order):
            break
        limit *= tolerance / found.error  # kernels are off by more than eager: each graph that is compiled aims lower
    _warn(reduced, [name for name, _ in order[:count]], off)
    return placed, outputs, found


def _deviation(placed: Placed, reduced: Reduced, inputs: Sequence[Any]) -> _Deviation:
    runs = placed.runs
    segments = placed.partition.graph.segments
    uncast = _uncast(reduced.graph)
    names = {name: uncast.get(name, name) for segment in segments for name in segment.outputs}
    written = WrittenRun(reduced.written, inputs, names.values())
    regions: dict[str, float] = {}

    def compared(index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
        results = runs[index](arguments)
        for name, result in zip(segment.outputs, results, strict=True):
            error = relative_error(written.value(names[name]), result)
            if error is not None:
                regions[segment.region.name] = max(error, regions.get(segment.region.name, 0.0))
        return results

    outputs = placed.python_executor().run(inputs, compared)
    expected = written.outputs()
    return _Deviation(_error(expected, outputs), regions, expected)


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
    layers = {node.name for node in reduced.graph.graph.nodes if is_layer(node) and converted_to(node)}
    errors = layer_errors(reduced.written, reduced.graph, layers, inputs)
    return sorted(errors.items(), key=lambda item: -item[1])


def _with_errors(placed: Placed, found: _Deviation) -> Placed:
    decisions = {
        name: dataclasses.replace(decision, precision_error=found.regions.get(name))
        for name, decision in placed.decisions.items()
    }
    conversion = placed.prepared.conversion
    assert conversion is not None
    prepared = dataclasses.replace(placed.prepared, conversion=dataclasses.replace(conversion, error=found.error))
    return dataclasses.replace(placed, decisions=decisions, prepared=prepared)


def _warn(reduced: Reduced, returned: Sequence[str], off: str) -> None:
    lines = {node.name: source_line(node) for node in reduced.written.graph.nodes}
    named = ", ".join(f"{name} ({lines[name]})" if lines[name] else name for name in returned[:_NAMED])
    more = f" and {len(returned) - _NAMED} more, which explain() lists" if len(returned) > _NAMED else ""
    _log.warning("%s (precision_tolerance): these layers are computed as written from now on: %s%s", off, named, more)
