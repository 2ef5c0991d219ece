"""Region: a convex piece of the graph that one engine may run as one unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.fx

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.sizes.size import Dim


class EagerRun(Protocol):
    """A graph as PyTorch runs it, on the list of its inputs, all values with their traced strides (`eager_graph.EagerGraph`).

    A call raises what PyTorch raises; `run` tells OperatorRefusedError apart: a fault that lies in the form of the values.
    """

    def __call__(self, inputs: Sequence[Any]) -> list[Any]: ...

    def run(self, inputs: Sequence[Any]) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class RegionInput:
    """A value that enters a region; `spec` is None where it is no tensor, `size` says which size it is where it is one. Constants
    (parameters, folded values) change rarely: engines may pack them."""

    name: str
    spec: TensorSpec | None
    is_constant: bool = False
    size: Dim | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """A functional ATen graph with static meaning: same inputs, same outputs, no mutation. One that `draws` random numbers has the same
    outputs for the same state of its device's generator, and leaves that in the same one (`core.engine.Engine.draws`).

    `graph_module` takes `inputs` in order and returns a tuple of `outputs`; every node carries `meta["val"]`. `eager` runs it.
    `node_names` are the names of the covered nodes in the partitioned graph; `source` is the user's line that
    the first of them came from ("model.py:12 in forward"), or "".
    `key` is the canonical form's SHA-256: it changes with any operator, wire, constant, dtype, shape, stride or device.
    `device` is where its operators run, and where its values are but for its `numbers`. What no engine claimed may hold operators of several
    devices: the host runs it, which sends each operator to its own.
    """

    name: str
    graph_module: torch.fx.GraphModule = field(compare=False, repr=False)
    eager: EagerRun = field(compare=False, repr=False)
    inputs: tuple[RegionInput, ...]
    outputs: tuple[TensorSpec | None, ...]
    node_names: tuple[str, ...]
    key: str
    device: Device
    source: str = ""
    draws: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Positions of the inputs that are tensors of no dimensions on the host, in a region of another device: kernels get them by value,
        read on the host in each call."""
        if self.device.is_host:
            return ()
        specs = [region_input.spec for region_input in self.inputs]
        return tuple(k for k, spec in enumerate(specs) if spec is not None and spec.device.is_host)


@dataclass(frozen=True, slots=True)
class Segment:
    """A region in its place in the whole graph: the graph values it reads and writes, by node name."""

    region: Region
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    engine_hint: str  # the engine that claimed it first; "eager" where none did


@dataclass(frozen=True, slots=True)
class PartitionedGraph:
    """A whole graph as segments in execution order; they cover every operator exactly once.

    `inputs` are the graph's placeholders in order; `constants` those of them that hold parameters, buffers or folded values.
    `outputs` are node names, or literal values (None, numbers) the graph returns as they are. `sizes`: the values of the graph that are
    sizes, inputs and computed ones, by name.
    """

    inputs: tuple[str, ...]
    constants: frozenset[str]
    segments: tuple[Segment, ...]
    outputs: tuple[object, ...]  # str: the name of a value; anything else: returned as it is
    sizes: Mapping[str, Dim] = field(default_factory=dict)

    @property
    def is_static(self) -> bool:
        """True if every size in the graph is a number."""
        specs = [
            s for segment in self.segments for s in (*(i.spec for i in segment.region.inputs), *segment.region.outputs)
        ]
        return not self.sizes and all(spec.is_static for spec in specs if spec is not None)
