"""The first stage of a captured graph: the passes, in the precision that is asked for, and what parameters alone decide split off. Part of the
wiring, as `stages` is, which has the stages after it.

CapturedGraph --prepare--> Prepared --reduced.written, returned, prepare_anew--> Prepared    the same with other layers as written
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph, GraphKind
from torch_hybrid_backend.core.plan import Conversion
from torch_hybrid_backend.core.precision import AS_WRITTEN
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.driver.bisection import bisected_passes
from torch_hybrid_backend.engines.cpu.target import NATIVE, Target
from torch_hybrid_backend.generators import can_draw_apart
from torch_hybrid_backend.graph.devices import is_on_host
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.graph.precision import converted_to
from torch_hybrid_backend.graph.quantized import KeepsPacked, keeps_nothing
from torch_hybrid_backend.graph.schema import only_draws
from torch_hybrid_backend.graph.values import effects, holds_collectives, is_repeatable
from torch_hybrid_backend.machine import default_weight_bits, weight_bits_of
from torch_hybrid_backend.partition.region_key import region_key
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.control_flow import compile_bodies
from torch_hybrid_backend.passes.hoist import Hoisted, hoist, partition_fold
from torch_hybrid_backend.passes.inline_subgraphs import inline_subgraphs
from torch_hybrid_backend.passes.pipeline import PASSES, PRECISION_PASSES, run_passes
from torch_hybrid_backend.passes.precision.conversion import conversion, mark_sites, quantized_as_written
from torch_hybrid_backend.passes.precision.lists import is_layer
from torch_hybrid_backend.runtime.constants import DividedFold, FoldPart


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """A graph in another precision than it was written in. `written`: as it was before; `context`: what the passes were told."""

    written: torch.fx.GraphModule
    graph: torch.fx.GraphModule
    context: PassContext

    @property
    def converted_layers(self) -> frozenset[str]:
        """Names of the layers that are not computed as written, in both graphs."""
        return frozenset(
            node.name
            for node in self.graph.graph.nodes
            if (is_layer(node) or node.target is torch.ops.aten.embedding.default) and converted_to(node)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A captured graph after the passes. `fold` computes what parameters alone decide; `is_repeatable`: running it twice goes unnoticed;
    `is_repeatable_apart`: so it does on copies of its inputs and with random numbers of its own (`generators.apart`).

    `conversion`: the outcome of another precision than as written, or of the model's own quantization; else None. `reduced`: the graph that
    the first call is compared with; None after that call, and if nothing was converted. `unrepeatable`: the first operator that keeps a call
    from being repeated; "" if none does.
    """

    name: str
    kind: GraphKind
    hoisted: Hoisted
    fold: DividedFold | None
    has_collectives: bool
    is_repeatable: bool
    is_repeatable_apart: bool
    conversion: Conversion | None = None
    reduced: Reduced | None = None
    unrepeatable: str = ""


def prepare(
    captured: CapturedGraph,
    name: str,
    config: Config,
    compile_body: Callable[[str, CapturedGraph], Callable[[list[Any]], list[Any]]],
    keeps_packed: KeepsPacked = keeps_nothing,
) -> Prepared:
    """Run the passes on a captured graph, in place; `compile_body` compiles what its control flow calls. `keeps_packed`: that of engines."""
    module = captured.graph_module
    inline_subgraphs(module)
    mark_sites(module)
    is_native = config.target == NATIVE
    bits = default_weight_bits() if is_native else weight_bits_of(Target.named(config.target).features)
    context = PassContext.of(captured, config.precision, config.weight_form, bits, keeps_packed)
    run_passes(module, context, bisected_passes(PASSES))
    reduced = None if context.precision == AS_WRITTEN else reduce_precision(module, context)
    # Sub-graphs are looked into, so before they are compiled.
    known = (holds_collectives(module), is_repeatable(module), hindrance(module) is None)
    effect = next(effects(module), None)
    unrepeatable = "" if effect is None else str(effect.target)
    compile_bodies(captured, compile_body)
    prepared = Prepared(name, captured.kind, *_split(module, context), *known, unrepeatable=unrepeatable)
    if reduced is None:
        by_model = quantized_as_written(module, context) if captured.kind == "inference" else None
        return dataclasses.replace(prepared, conversion=by_model)
    return _told(prepared, reduced, config)


def _split(module: torch.fx.GraphModule, context: PassContext) -> tuple[Hoisted, DividedFold | None]:
    hoisted = hoist(module, context.constants, context.keeps_packed)
    if hoisted.fold is None:
        return hoisted, None
    parts = (
        FoldPart(part.reads, part.gives, EagerGraph(part.graph), "" if part.is_view else region_key(part.graph, ()))
        for part in partition_fold(hoisted.fold)
    )
    return hoisted, DividedFold(tuple(parts))


def reduce_precision(module: torch.fx.GraphModule, context: PassContext) -> Reduced:
    """Convert the graph, in place, to the precision that the context says."""
    written = copy_of(module)
    run_passes(module, context, bisected_passes(PRECISION_PASSES))
    return Reduced(written, module, context)


def returned(reduced: Reduced, layers: Mapping[str, Refused]) -> Reduced:
    """The graph with these layers as written too, by name, and why."""
    context = dataclasses.replace(reduced.context, as_written={**reduced.context.as_written, **layers})
    return reduce_precision(copy_of(reduced.written), context)


def copy_of(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph, with the same tensors, and such copies of the graphs that its control flow calls."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = torch.fx.GraphModule(module, graph, "Graph")
    for name, body in copy.named_children():
        if isinstance(body, torch.fx.GraphModule):
            setattr(copy, name, copy_of(body))
    return copy


def hindrance(module: torch.fx.GraphModule) -> torch.fx.Node | None:
    """The node that keeps a graph from being run unnoticed on copies of its inputs, with random numbers of its own; None where nothing does."""
    on_host = is_on_host(module)
    return next((n for n in effects(module) if not (on_host and only_draws(n) and can_draw_apart(n.target))), None)


def _told(prepared: Prepared, reduced: Reduced, config: Config) -> Prepared:
    """The graph with what its precision made of it."""
    outcome = conversion(reduced.graph, reduced.context, config.precision_tolerance)
    return dataclasses.replace(prepared, conversion=outcome, reduced=reduced if outcome.converted else None)


def prepare_anew(prepared: Prepared, reduced: Reduced, config: Config) -> Prepared:
    """The graph as its precision makes it with other layers as written."""
    hoisted, fold = _split(reduced.graph, reduced.context)
    return _told(dataclasses.replace(prepared, hoisted=hoisted, fold=fold), reduced, config)
