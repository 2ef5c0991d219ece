"""Costs where regions meet, by estimate.

    eager behind a region      the C++ plan calls Python, as it does for an engine's region without a program
    another form               a value is copied into the dtype, strides or device in which the engine reads it (`Engine.reads`)

Copies between devices that the graph itself asks for are operators of eager's, and counted with them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch_hybrid_backend.core.engine import EAGER, Engine
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.partition.estimate import CALLBACK_US, copy_us, roofline


def callbacks_us(graph: PartitionedGraph, runs: Mapping[str, str], from_python: Container[str] = ()) -> float:
    """Microseconds of one call that going back to Python costs, where `runs` (region name -> engine name) says who runs what: for each segment
    of eager's, and each region among `from_python`, whose engine has no program for the plan. 0 where eager runs the whole graph.

    Steps of a program that only Python can run are none of these: who times a program times them, and the way to them, and who estimates it
    counts them (`estimate.engine_us`).
    """
    names = [segment.region.name for segment in graph.segments]
    if all(runs[name] == EAGER for name in names):
        return 0.0
    return CALLBACK_US * sum(runs[name] == EAGER or name in from_python for name in names)


def conversions_us(graph: PartitionedGraph, runs: Mapping[str, str], engines: Mapping[str, Engine]) -> float | None:
    """Estimated microseconds of one call that copies into the forms which the engines read cost; None where a device has no roofline to
    estimate a copy by. What is timed contains them."""
    total = 0.0
    for segment in graph.segments:
        name = runs[segment.region.name]
        for value in segment.region.inputs if name != EAGER else ():
            if value.spec is None or value.is_constant:
                continue
            form = engines[name].reads(value.spec)
            if form == value.spec:
                continue
            on = roofline(segment.region.device)
            if on is None:
                return None
            total += copy_us(value.spec, form, on)
    return total
