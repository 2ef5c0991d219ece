"""Estimated costs of the boundaries between regions.

    eager after a region       the C++ plan calls Python, as it does for an engine's region without a program
    another form               a value is copied into the dtype, strides or device in which the engine reads it (`Engine.reads`)

Copies between devices that the graph itself contains are eager's operators, and are counted with these.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch_hybrid_backend.core.engine import EAGER, Engine
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.partition.estimate import CALLBACK_US, copy_us, roofline


def callbacks_us(graph: PartitionedGraph, runs: Mapping[str, str], from_python: Container[str] = ()) -> float:
    """Microseconds that calls from the plan back to Python cost in one call of the graph; 0 if eager runs the whole graph.

    `runs`: region name -> name of the engine that runs it. `from_python`: regions whose engine has no program for the plan. Each of these
    regions and each of eager's segments costs one call.

    Steps within a program that only Python can run are not counted: a program's measured time contains them, and so does its estimate
    (`estimate.engine_us`).
    """
    names = [segment.region.name for segment in graph.segments]
    if all(runs[name] == EAGER for name in names):
        return 0.0
    return CALLBACK_US * sum(runs[name] == EAGER or name in from_python for name in names)


def conversions_us(graph: PartitionedGraph, runs: Mapping[str, str], engines: Mapping[str, Engine]) -> float | None:
    """Estimated microseconds that copies into the forms which the engines read cost in one call. None if a device has no roofline.

    Measured times contain these copies.
    """
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
