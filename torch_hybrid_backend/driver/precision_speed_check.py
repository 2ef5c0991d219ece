"""The speed check of a precision: in its first call, a graph of reduced precision is timed beside itself as written. Part of the wiring.

    int8: 5600 us a call, as written 5300 us; conv_3 takes 410 us in int8, with its casts, 250 us as written, six others likewise
    int8 without these seven: 4100 us      that is what runs from now on; `explain` has the seven as `slower`, with their times

Three graphs are timed whole, so that all casts count: as its precision made it, as written, and with the layers as written that lose when the
kernels of the first two are compared one by one. The fastest stays. What was found is kept on disk: a later process compiles that alone.
Nothing is compiled for a graph whose products take less time than float32's instructions need for them at their full rate. A graph that the
accuracy check has changed is timed once more.
(docs/adr/0041-mixed-precision-by-timed-layers.md)
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.region import Segment
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.driver.bisection import is_running
from torch_hybrid_backend.driver.prepared import Prepared, Reduced, prepare_anew, returned
from torch_hybrid_backend.driver.stages import Assignment, Place, PricingOn, build_executable
from torch_hybrid_backend.errors import failures, is_out_of_memory
from torch_hybrid_backend.graph.devices import is_on_host
from torch_hybrid_backend.graph.values import is_repeatable
from torch_hybrid_backend.machine import may_use_tiles
from torch_hybrid_backend.measuring.measure import measure
from torch_hybrid_backend.measuring.other_load import MARGIN, OtherLoad
from torch_hybrid_backend.measuring.timing_cache import KeptTimes
from torch_hybrid_backend.partition.layer_times import float32_rate, layer_us, least_us, worth_mixing
from torch_hybrid_backend.partition.placement import Pricing, timing_key
from torch_hybrid_backend.partition.region_key import region_key
from torch_hybrid_backend.runtime.constant_pool import release_unused

_log = logging.getLogger(__name__)

_KIND = "precisions"  # in the cache of timings
# What the precision that was asked for may lose of a call: less is noise.
_NOISE = 0.03
# What a layer must lose to be as written, and a third graph must promise to be compiled: times of kernels are of few calls.
_WORTH = 0.05
_WHOLE, _WRITTEN, _MIXED = "as asked for", "as written", "without those that lose"
# A graph so many times as slow as as written tells more of the machine's load: the next process times it again.
_IMPLAUSIBLE_RATIO = 10.0
_ROUNDS = 5
_RATE_BUDGET_S = 0.1
# Weights in few bits are asked for because they are small.
_IN_QUESTION = ("bf16", "fp16", "int8", "int8+bf16")

Times = Mapping[str, float]


def as_known(prepared: Prepared, config: Config, pricing_on: PricingOn) -> Prepared:
    """The graph as an earlier process has found it fastest; as it is where none has timed it."""
    if (reduced := _in_question(prepared, config)) is None:
        return prepared
    known = _known(reduced, pricing_on(CPU))
    slow = _slow_layers(reduced, known, _noise(known.is_disturbed))
    return _without(prepared, reduced, slow, config) if slow else prepared


def fastest(
    assignment: Assignment,
    outputs: list[Any],
    inputs: Sequence[Any],
    config: Config,
    pricing_on: PricingOn,
    place_anew: Place,
) -> tuple[Assignment, list[Any]]:
    """The graph without the layers that take longer in its precision than as written, casts included, and its outputs for `inputs`."""
    pricing = pricing_on(CPU)
    reduced = _in_question(assignment.prepared, config)
    if reduced is None or not assignment.partition.graph.is_static:
        return assignment, outputs
    if known := _known(reduced, pricing):
        layers = reduced.converted_layers
        slow_layers = _slow_layers(reduced, known, _noise(known.is_disturbed))
        slow = {name: why for name, why in slow_layers.items() if name in layers}
        return place_anew(_without(assignment.prepared, reduced, slow, config)) if slow else (assignment, outputs)
    load = OtherLoad()
    try:
        timings = _PrecisionTimings(assignment, outputs, reduced, inputs, config, pricing, place_anew)
        times = timings.times()
    except failures(RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _log.info("there is no memory to time the graph as written too")
        return assignment, outputs
    finally:
        release_unused()
    is_disturbed = load.is_felt()
    if pricing.timings is not None and times and _is_plausible(times) and not timings.is_partial:
        pricing.timings.put(_KIND, _key(reduced, pricing), pricing.device, times, is_disturbed=is_disturbed)
    return timings.best(times, _noise(is_disturbed))


def _in_question(prepared: Prepared, config: Config) -> Reduced | None:
    """The reduced graph, if timing it may change its precision; else None."""
    reduced = prepared.reduced
    if reduced is None or config.precision not in _IN_QUESTION or config.placement == "estimate" or is_running():
        return None
    if config.verify == "always" or prepared.has_collectives or not is_repeatable(reduced.written):
        return None
    return reduced if is_on_host(reduced.written) else None


def _key(reduced: Reduced, pricing: Pricing) -> str:
    key = f"{region_key(reduced.written, ())} {reduced.context.precision}"
    # By their places, as names may differ in graphs that are alike. Layers that are slower are what times tell.
    why = reduced.context.as_written
    off = [
        place
        for place, node in enumerate(reduced.written.graph.nodes)
        if node.name in why and why[node.name].code is Reason.ACCURACY
    ]
    return timing_key(f"{key} without {off}" if off else key, pricing.versions)


def _known(reduced: Reduced, pricing: Pricing) -> KeptTimes:
    return (
        KeptTimes() if pricing.timings is None else pricing.timings.get(_KIND, _key(reduced, pricing), pricing.device)
    )


def _is_plausible(times: Times) -> bool:
    return times.get(_WRITTEN, math.inf) * _IMPLAUSIBLE_RATIO > times[_WHOLE]


def _noise(is_disturbed: bool) -> float:
    return MARGIN - 1 if is_disturbed else _NOISE


def _best(times: Times, noise: float) -> str:
    best = _WHOLE
    for name in (_MIXED, _WRITTEN):
        if name in times and (1 + noise) * times[name] < times.get(best, math.inf):
            best = name
    return best


def _slow_layers(reduced: Reduced, times: Times, noise: float) -> Mapping[str, Refused]:
    """The layers that are to be as written by what was timed, and why. A layer's times are under its place in the graph: names may differ in
    graphs that are alike."""
    best, precision = _best(times, noise), reduced.context.precision
    if best == _WHOLE:
        return {}
    whole = Refused(
        Reason.SLOWER,
        f"the whole graph takes {time_in_words(times[_WHOLE])} in {precision}, {time_in_words(times[_WRITTEN])} as written",
    )
    layers, slow = reduced.converted_layers, dict[str, Refused]()
    for place, node in enumerate(reduced.written.graph.nodes):
        converted, written = (times.get(f"{place} {how}", math.nan) for how in (_WHOLE, _WRITTEN))
        if written < (1 - _WORTH) * converted:
            why = f"it takes {time_in_words(converted)} in {precision}, casts included, {time_in_words(written)} as written"
            slow[node.name] = Refused(Reason.SLOWER, why)
        elif best == _WRITTEN and node.name in layers:
            slow[node.name] = whole
    return slow


def _without(prepared: Prepared, reduced: Reduced, slow: Mapping[str, Refused], config: Config) -> Prepared:
    return prepare_anew(prepared, returned(reduced, slow), config)


class _PrecisionTimings:
    """A graph in its precision, as written, and in between, in the first call. Owns what was compiled for it."""

    def __init__(
        self,
        assignment: Assignment,
        outputs: list[Any],
        reduced: Reduced,
        inputs: Sequence[Any],
        config: Config,
        pricing: Pricing,
        place_anew: Place,
    ) -> None:
        self._reduced = reduced
        self._inputs = inputs
        self._config = config
        self._pricing = pricing
        self._place_anew = place_anew
        self._choices = {_WHOLE: (assignment, outputs)}
        self._layers = reduced.converted_layers

    @property
    def is_partial(self) -> bool:
        """True if one of the graphs lacks kernels that another process may have."""
        return any(assignment.is_partial for assignment, _ in self._choices.values())

    def times(self) -> Times:
        """Microseconds of a call of each graph, and of the layers in the first two; nothing where there is no time left to compile them."""
        assignment, _ = self._choices[_WHOLE]
        spent = _cost_us(assignment, self._layers)
        if spent is not None and spent <= least_us(self._reduced.written.graph, _rate(), has_tiles=may_use_tiles()):
            return {_WHOLE: spent}
        if self._pricing.deadline.is_over():
            return {}
        self._compile(_WRITTEN, self._layers)
        layers = {_WHOLE: self._layer_us(assignment, self._reduced.graph)}
        layers[_WRITTEN] = self._layer_us(self._choices[_WRITTEN][0], self._reduced.written)
        if slow := worth_mixing(layers[_WHOLE], layers[_WRITTEN], _WORTH):
            self._compile(_MIXED, slow)
        places = {node.name: place for place, node in enumerate(self._reduced.written.graph.nodes)}
        by_layer = {f"{places[name]} {how}": us for how, times in layers.items() for name, us in times.items()}
        return {**self._whole_us(), **by_layer}

    def best(self, times: Times, noise: float) -> tuple[Assignment, list[Any]]:
        """The graph that is fastest by `times`, by more than this share of a call, with the reasons why layers are as written."""
        best = _best(times, noise)
        shown = ", ".join(
            f"{name} {time_in_words(times[name])}" for name in (_WHOLE, _MIXED, _WRITTEN) if name in times
        )
        _log.info("precision=%s: %s: it runs %s", self._config.precision, shown or "not timed", best)
        assignment, outputs = self._choices[best]
        why, conversion = _slow_layers(self._reduced, times, noise), assignment.prepared.conversion
        assert conversion is not None
        left = tuple(replace(layer, why=why.get(layer.name, layer).why) for layer in conversion.left)
        prepared = replace(assignment.prepared, conversion=replace(conversion, left=left))
        return replace(assignment, prepared=prepared), outputs

    def _compile(self, name: str, layers: Iterable[str]) -> None:
        """The graph with these layers as written."""
        slow = dict.fromkeys(layers, Refused(Reason.SLOWER, "it is timed"))
        prepared = self._choices[_WHOLE][0].prepared
        self._choices[name] = self._place_anew(_without(prepared, self._reduced, slow, self._config))

    def _layer_us(self, assignment: Assignment, graph: torch.fx.GraphModule) -> Mapping[str, float]:
        """Microseconds of each layer whose engine can tell, the best of a few calls."""
        runs, parts = assignment.runs, list[tuple[frozenset[str], float]]()

        def timed(index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
            compiled = assignment.compiled.get(segment.region.name)
            if compiled is not None:
                rounds = [compiled.operator_us(arguments) for _ in range(_ROUNDS)]
                parts.extend((part[0][0], min(us for _, us in part)) for part in zip(*rounds, strict=True))
            return runs[index](arguments)

        assignment.python_executor().run(self._inputs, timed)
        written = {node.name for node in self._reduced.written.graph.nodes}
        times = layer_us(graph.graph, self._layers, written, parts)
        return {name: us for name, us in times.items() if math.isfinite(us)}

    def _whole_us(self) -> Mapping[str, float]:
        runs = [
            build_executable(assignment, self._inputs, self._config).run for assignment, _ in self._choices.values()
        ]
        calls = [functools.partial(lambda run: run(list(self._inputs)), run) for run in runs]
        with torch.no_grad():
            timings = measure(calls, self._config.measure_budget_s, until_decided=True, timer=self._pricing.timer)
        return {name: timing.low_us for name, timing in zip(self._choices, timings, strict=True)}


def _cost_us(assignment: Assignment, layers: Collection[str]) -> float | None:
    """Time of the regions that compute the layers; None where one of these is in no region that was timed."""
    spent, timed = 0.0, set[str]()
    for decision in assignment.decisions.values():
        for cost in decision.costs:
            if cost.engine == decision.engine:
                spent += cost.microseconds
                timed.update(decision.node_names)
    return spent if timed.issuperset(layers) else None


def _rate() -> float:
    """Floating-point operations of float32 per microsecond, of this process's threads."""
    return _rate_of(torch.get_num_threads())


@functools.cache
def _rate_of(_threads: int) -> float:
    return float32_rate(lambda call: measure([call], _RATE_BUDGET_S)[0].low_us)
