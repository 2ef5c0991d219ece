"""What it costs where regions meet, by estimate.

    eager behind a region      the C++ plan calls Python
    another form               a value is copied into the dtype, strides or device in which the engine reads it (`Engine.reads`)

Copies between devices that the graph itself asks for are operators of eager's, and counted with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_hybrid_backend.core.engine import EAGER, Engine
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.partition.estimate import copy_us, roofline

# A call of Python from the C++ plan, with its arguments wrapped and its results unwrapped (docs/performance.md).
CALLBACK_US = 10.0


def boundaries_us(
    graph: PartitionedGraph, runs: Mapping[str, str], engines: Mapping[str, Engine], *, converting: bool = True
) -> float | None:
    """Estimated microseconds of one call that the graph's boundaries cost, where `runs` (region name -> engine name) says who runs what.

    `converting`: copies count; they do not where regions were timed, which is with them. A graph that eager runs alone has no boundary. None
    where a device has no roofline to estimate a copy by.
    """
    if all(name == EAGER for name in runs.values()):
        return 0.0
    total = 0.0
    for segment in graph.segments:
        name = runs[segment.region.name]
        if name == EAGER:
            total += CALLBACK_US
            continue
        for value in segment.region.inputs if converting else ():
            if value.spec is None or value.is_constant:
                continue
            form = engines[name].reads(value.spec)
            if form != value.spec:
                on = roofline(segment.region.device)
                if on is None:
                    return None
                total += copy_us(value.spec, form, on)
    return total
