"""Deviation of a graph of reduced precision from the same graph as written, on the inputs of one call.

An error is relative: the root mean square of the difference over that of the values as written. Values that no number tells apart (equal
infinities, NaN in both) do not count; where one is finite and the other is not, the error is infinite. Integers are not compared: the index
of the largest of two that are nearly equal may be either's.

    WrittenRun            the graph as written, run step by step beside what it is compared with: few values are alive at once
    is_telling            True if what is computed of a tensor says something about the errors of other inputs
    layer_errors          what each layer adds by itself: it alone in its precision, on the values as written
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

# Of the values that a layer reads: with fewer that are not zero there is next to nothing to be off by. Behind a ReLU half of them are.
_LEAST_SHARE = 0.01


def relative_error(reference: object, result: object) -> float | None:
    """The error of one value, or the largest of several's; None where there is nothing to compare."""
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
            a, b = a.where(finite, 0.0), b.where(finite, 0.0)  # noqa: PLW2901  the same without what no number tells apart
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
    """True if one of a call's inputs is telling, or none has more than one element: a single token, say, is what it is."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel() != 1]
    return not tensors or any(map(is_telling, tensors))


def changing_inputs(graph: torch.fx.GraphModule, constants: Collection[str]) -> Mapping[str, frozenset[Node]]:
    """Names of operators -> those of their floating-point inputs that calls change. constants: placeholders that they do not."""
    changing: set[Node] = set()
    found: dict[str, frozenset[Node]] = {}
    for node in graph.graph.nodes:
        sources = [source for source in node.all_input_nodes if source in changing]
        if sources or (node.op == "placeholder" and node.name not in constants):
            changing.add(node)
        values = [(source, source.meta.get("val")) for source in sources]
        found[node.name] = frozenset(s for s, v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
    return found


class WrittenRun:
    """A graph as written, which runs as far as its values are asked for. Owns those that are yet to be asked for.

    `unseen`: names of those of the `watched` operators that have run and for whom one of the given inputs was not telling.
    """

    def __init__(
        self,
        written: torch.fx.GraphModule,
        inputs: Sequence[Any],
        wanted: Collection[str],
        watched: Mapping[str, frozenset[Node]] = MappingProxyType({}),
    ) -> None:
        """wanted: names of the values that will be asked for, once each. watched: names of operators, and which inputs to look at."""
        self._run = TracedRun(written)
        self._values = self._run.values(inputs)
        self._watched = watched
        self.unseen: list[str] = []
        self._pending = {node.name for node in written.graph.nodes if node.op == "call_function"}.intersection(wanted)
        self._found: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        """The wanted value of that name; None if the graph has none."""
        while name in self._pending:
            self._step()
        return self._found.pop(name, None)

    def outputs(self) -> Sequence[Any]:
        """The graph's outputs, after all else."""
        outputs: Sequence[Any] = ()
        while (found := self._step()) is not None:
            outputs = found[1]
        return outputs

    @torch.no_grad()
    def _step(self) -> tuple[Node, Any] | None:
        found = next(self._values, None)
        if found is not None and not all(is_telling(self._run.env[n]) for n in self._watched.get(found[0].name, ())):
            self.unseen.append(found[0].name)
        if found is not None and found[0].name in self._pending:
            self._pending.remove(found[0].name)
            self._found[found[0].name] = found[1]
        return found


@torch.no_grad()
def layer_errors(
    written: torch.fx.GraphModule, reduced: torch.fx.GraphModule, layers: Collection[str], inputs: Sequence[Any]
) -> Mapping[str, float]:
    """The error that each of the `layers` makes by itself: computed as in `reduced` of the values in `written`, beside its value there.

    Both graphs have the layers under the same names; nodes that only `reduced` has (casts, quantisations) are computed with the layer.
    An error is infinite where the layer does not run in eager, for want of memory or else.
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
    """A layer and what lies between it and the values that both graphs have, its `leaves`."""

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
        """The layer's value. `values`: those of the leaves, by name, in the graph as written."""
        found: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            if node not in found:
                if node.name in self.leaves:
                    found[node] = _as_traced(values[node.name], node.meta.get("val"))
                else:
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
                    found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return found[node]

        return value(self._layer)


def _as_traced(value: Any, traced: Any) -> Any:
    """The value in the dtype that it has in the other graph."""
    both = isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor)
    return value.to(traced.dtype) if both and value.dtype != traced.dtype else value
