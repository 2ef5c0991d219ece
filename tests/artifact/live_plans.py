"""The plans that exports are made of, as functions of a call: what their files must give bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from torch_hybrid_backend.capture.exported import Copied, ExportedGraph, GraphInput, GraphOutput, ViewOf
from torch_hybrid_backend.driver import export as exporting
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph


@dataclass(slots=True)
class LivePlans:
    """The graphs that were exported, by entry."""

    made: dict[str, tuple[ExportedGraph, HybridGraph, list[Any]]] = field(default_factory=dict)

    def fresh(self, entry: str = exporting.ENTRY) -> LivePlans:
        """The entry's graph with buffers as they were exported."""
        graph, compiled, inputs = self.made[entry]
        return LivePlans({entry: (graph, compiled, [each.clone() for each in inputs])})

    def results(self, flat: Sequence[Any], entry: str = exporting.ENTRY) -> list[torch.Tensor]:
        """The tensors among the results of a call with flat arguments. Arguments that the model changes are changed; its buffers as well."""
        graph, compiled, inputs = self.made[entry]
        given = [*inputs[: len(graph.tensors)], *(flat[position] for position in graph.arguments)]
        with torch.no_grad():
            outputs = compiled(list(given))
            for update in graph.updates:
                if isinstance(update, Copied):
                    given[update.position].copy_(outputs[update.output])
                    continue
                index, source = (
                    outputs[of.number] if isinstance(of, GraphOutput) else given[of.position]
                    for of in (update.index, update.source)
                )
                target = given[update.position]
                source = source[(None,) * (target.dim() - source.dim())]
                target.index_copy_(update.dim, index.remainder(target.shape[update.dim]), source)

        def value(result: object) -> Any:
            match result:
                case GraphOutput(number):
                    return outputs[number]
                case GraphInput(position):
                    return given[position]
                case ViewOf(origin, view):
                    base = value(origin)
                    strided = base.as_strided(view.size, view.stride, base.storage_offset() + view.offset)
                    return view.bits.view_of(strided)
            return result

        return [each for each in map(value, graph.results) if isinstance(each, torch.Tensor)]


@contextmanager
def live_plans() -> Iterator[LivePlans]:
    """Remember what is exported meanwhile."""
    found = LivePlans()
    add = exporting._Exporter.add

    def remembering(
        self: Any, name: str, program: Any, graph: Any, compiled: Any, inputs: Any, outputs: Any, flat: Any
    ) -> None:
        found.made[name] = (graph, compiled, [each.clone() for each in inputs])
        add(self, name, program, graph, compiled, inputs, outputs, flat)

    with mock.patch.object(exporting._Exporter, "add", remembering):
        yield found
