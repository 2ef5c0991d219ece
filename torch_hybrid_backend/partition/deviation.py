"""Deviation of a graph of reduced precision from the same graph as written, on the inputs of one call.

An error is relative: the root mean square of the difference over that of the values as written. Equal infinities and NaN in both values do not
count. If one value is finite and the other is not, the error is infinite. Integers are not compared: the index of the largest of two nearly
equal values may be either.

    WrittenRun            the graph as written, run step by step beside the reduced graph, so that few values are alive at once
    is_telling            true if errors on a tensor say something about the errors on other inputs
    layer_errors          the error of each layer by itself: that layer alone in reduced precision, on the values as written
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.graph.eager_graph import TracedRun
from torch_hybrid_backend.partition.blocks import blocks, widened
from torch_hybrid_backend.torch_private import tree_leaves

# The least share of nonzero values among those that a layer reads. With fewer there are next to no errors to see. After a ReLU half are
# nonzero.
_LEAST_SHARE = 0.01


def relative_error(reference: object, result: object) -> float | None:
    """The relative error of a value, or the largest error of several values; None if there is nothing to compare."""
    if reference is None:
        return None
    pairs = zip(tree_leaves(reference), tree_leaves(result), strict=True)
    return max((_relative_error(a, b) for a, b in pairs if _has_values(a) and _has_values(b)), default=None)


def _has_values(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided


@torch.no_grad()
def _relative_error(reference: torch.Tensor, result: torch.Tensor) -> float:
    difference = norm = 0.0
    for a, b in (map(widened, each) for each in blocks(reference, result)):
        finite = a.isfinite() & b.isfinite()
        if not finite.all():
            if not (finite | (a == b) | (a.isnan() & b.isnan())).all():
                return math.inf
            a, b = a.where(finite, 0.0), b.where(finite, 0.0)  # noqa: PLW2901  the same without equal infinities and NaN
        difference = math.hypot(difference, float(torch.linalg.vector_norm(b - a)))
        norm = math.hypot(norm, float(torch.linalg.vector_norm(a)))
    return difference / norm if norm else (math.inf if difference else 0.0)


def is_telling(values: torch.Tensor) -> bool:
    """True if the values differ from each other and are not nearly all zero: zeros and padding have no rounding errors to show."""
    if values.layout is not torch.strided or values.is_complex():
        return True
    if values.numel() < 2:
        return bool(values.numel()) and bool(values.any())
    if int(torch.count_nonzero(values)) < _LEAST_SHARE * values.numel():
        return False
    first = values[(0,) * values.dim()]
    return bool((values != first).any())


def any_telling(values: Sequence[Any]) -> bool:
    """True if one of a call's inputs is telling, or if no input has more than one element, as a single token."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel() != 1]
    return not tensors or any(map(is_telling, tensors))


def changing_inputs(graph: torch.fx.GraphModule, constants: Collection[str]) -> Mapping[str, frozenset[Node]]:
    """Operator name -> its floating-point inputs that differ from call to call. constants: placeholders that do not."""
    changing: set[Node] = set()
    inputs: dict[str, frozenset[Node]] = {}
    for node in graph.graph.nodes:
        sources = [source for source in node.all_input_nodes if source in changing]
        if sources or (node.op == "placeholder" and node.name not in constants):
            changing.add(node)
        values = [(source, source.meta.get("val")) for source in sources]
        inputs[node.name] = frozenset(s for s, v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
    return inputs


class WrittenRun:
    """Run of a graph as written that goes only as far as values are asked for. Owns the values that have not been asked for yet.

    `unseen`: names of the `watched` operators that have run on an input that was not telling.
    """

    def __init__(
        self,
        written: torch.fx.GraphModule,
        inputs: Sequence[Any],
        wanted: Collection[str],
        watched: Mapping[str, frozenset[Node]] = MappingProxyType({}),
    ) -> None:
        """wanted: names of the values that will be asked for, once each. watched: operator name -> the inputs to look at."""
        self._run = TracedRun(written)
        self._values = self._run.values(inputs)
        self._watched = watched
        self.unseen: list[str] = []
        self._pending = {node.name for node in written.graph.nodes if node.op == "call_function"}.intersection(wanted)
        self._ready: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        """The wanted value of that name; None if the graph has none."""
        while name in self._pending:
            self._step()
        return self._ready.pop(name, None)

    def outputs(self) -> Sequence[Any]:
        """The graph's outputs; runs the rest of the graph."""
        outputs: Sequence[Any] = ()
        while (step := self._step()) is not None:
            outputs = step[1]
        return outputs

    @torch.no_grad()
    def _step(self) -> tuple[Node, Any] | None:
        step = next(self._values, None)
        if step is not None and not all(is_telling(self._run.env[n]) for n in self._watched.get(step[0].name, ())):
            self.unseen.append(step[0].name)
        if step is not None and step[0].name in self._pending:
            self._pending.remove(step[0].name)
            self._ready[step[0].name] = step[1]
        return step


@torch.no_grad()
def layer_errors(
    written: torch.fx.GraphModule, reduced: torch.fx.GraphModule, layers: Collection[str], inputs: Sequence[Any]
) -> Mapping[str, float]:
    """The error that each of the `layers` makes by itself: the layer of `reduced`, computed from the values of `written`, against `written`.

    Both graphs have the layers under the same names. Nodes that only `reduced` has (casts, quantizations) are computed with their layer.
    The error is infinite if the layer does not run in eager, for want of memory or another reason.
    """
    known = {node.name for node in written.graph.nodes}
    cones = {node.name: _Cone(node, known) for node in reduced.graph.nodes if node.name in layers}
    uses = Counter(name for cone in cones.values() for name in cone.leaves)
    values: dict[str, Any] = {}
    errors: dict[str, float] = {}
    for node, value in TracedRun(written).values(inputs):
        if node.name in uses:
            values[node.name] = value
        if node.name not in cones:
            continue
        cone = cones[node.name]
        try:
            errors[node.name] = relative_error(value, cone.run(values)) or 0.0
        except failures(RuntimeError, TypeError, ValueError, MemoryError):
            errors[node.name] = math.inf
        uses.subtract(cone.leaves)
        for name in cone.leaves:
            if not uses[name]:
                del values[name]
    return errors


class _Cone:
    """A layer and the nodes between it and its `leaves`: the nearest values that both graphs have."""

    def __init__(self, layer: Node, known: Collection[str]) -> None:
        self.leaves: set[str] = set()
        self._layer = layer
        pending = list(layer.all_input_nodes)
        while pending:
            node = pending.pop()
            if node.name in known:
                self.leaves.add(node.name)
            else:
                pending += node.all_input_nodes

    def run(self, values: Mapping[str, Any]) -> Any:
        """The layer's value. `values`: leaf name -> the leaf's value in the graph as written."""
        computed: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            if node not in computed:
                if node.name in self.leaves:
                    computed[node] = _as_traced(values[node.name], node.meta.get("val"))
                else:
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
                    computed[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return computed[node]

        return value(self._layer)


def _as_traced(value: Any, traced: Any) -> Any:
    """The value in the dtype that it has in the other graph."""
    both = isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor)
    return value.to(traced.dtype) if both and value.dtype != traced.dtype else value
