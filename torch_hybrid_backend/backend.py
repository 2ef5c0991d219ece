"""The backend: what `torch.compile` calls. With `hybrid_graph` and `stages` it wires all rooms together. Read it first.

torch.compile(model, backend="hybrid")
  -> capture      Dynamo's graph -> functional ATen graphs
  -> passes       fold, simplify; split off what depends on parameters alone (hoist)
  -> partition    regions and who may run them
  -> engines      regions -> compiled regions
  -> first call   every candidate checked against eager and priced (partition.placement), on the real inputs
  -> runtime      the winners as one C++ plan
  -> whole call   the plan priced against Dynamo's graph in eager (partition.whole_call)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from torch_hybrid_backend.bisection import is_running
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.capture.cache.aot_cache import AotCache
from torch_hybrid_backend.config import Config, apply_log_level
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.plan import Plan, Unconverted
from torch_hybrid_backend.core.precision import AS_WRITTEN
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.garbage import collector_paused
from torch_hybrid_backend.graph.values import is_repeatable
from torch_hybrid_backend.hybrid_graph import HybridGraph, OnPlan, OnRegions, pricing_of
from torch_hybrid_backend.machine import lacking_instructions
from torch_hybrid_backend.partition.seen_graphs import SeenGraphs, graph_key
from torch_hybrid_backend.partition.whole_call import PricedCall
from torch_hybrid_backend.quantization.ranges import left_in_float
from torch_hybrid_backend.report import Explanation
from torch_hybrid_backend.session import open_session

log = logging.getLogger(__name__)


def hybrid(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend: compiles one graph; `torch.compile(model, backend="hybrid")` calls it.

    mode, options: as given to `torch.compile`; see `config.Config`. Raises ConfigError for unknown settings or values; no
    fault of an engine reaches the caller unless `strict` is set.
    """
    return compile_graph(gm, example_inputs, Config.from_env(os.environ).with_options(options, mode))


@collector_paused()
def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    on_plan: OnPlan | None = None,
    on_regions: OnRegions | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph under `config`; `on_plan` gets each plan when it is made (in the graph's first call),
    `on_regions` what its regions were compiled to."""
    apply_log_level(config)
    config = with_instructions(config)
    shared = open_session(config)
    deadline = Deadline(config.compile_deadline_s)
    devices = {CPU, *(Device.of(value.device) for value in example_inputs if isinstance(value, torch.Tensor))}
    key = graph_key(
        gm, example_inputs, f"{config.precision} {[shared.versions(device) for device in sorted(devices, key=str)]}"
    )
    calls: list[PricedCall] = []

    @collector_paused()  # a backward graph may be compiled later, when backward is called
    def compile_captured(captured: CapturedGraph) -> Callable[[list[Any]], list[Any]]:
        if captured.kind == "forward" and config.precision != AS_WRITTEN:
            log.warning("precision=%s is for inference: a graph for training is computed as written", config.precision)
        if not _is_priced_whole(captured, config):
            return HybridGraph(captured, shared, config, on_plan, deadline=deadline, on_regions=on_regions)
        sizes = [k for k, value in enumerate(example_inputs) if isinstance(value, int | torch.SymInt)]
        pricing = functools.partial(
            pricing_of, shared, config, deadline, CPU
        )  # only calls on the host are priced whole
        call = PricedCall(gm.forward, key, sizes, config.measure_budget_s, pricing, on_plan)
        calls.append(call)
        return HybridGraph(captured, shared, config, call.take_plan, deadline=deadline, on_regions=on_regions)

    def compiled_whole() -> Callable[..., Any]:
        planned = capture(gm, example_inputs, compile_captured, keep_ops, kept)
        return calls[0].around(planned) if calls else planned

    keep_ops = frozenset[torch._ops.OpOverload]().union(*(engine.keep_ops for engine in shared.engines))
    kept = AotCache(shared.services.store) if config.cache else None
    known = SeenGraphs(shared.services.store)
    if key in known:
        return compiled_whole()
    shared.prepare(len(gm.graph.nodes))  # what engines need to compile starts while AOTAutograd traces
    compiled = compiled_whole()
    known.add(key)
    return compiled


def with_instructions(config: Config) -> Config:
    """`config` in a precision that this machine has instructions for, by one WARNING where it lacks those of the one that was asked for."""
    for half, without in (("bf16", {"bf16": AS_WRITTEN, "int8+bf16": "int8"}), ("fp16", {"fp16": AS_WRITTEN})):
        if config.precision in without and (lacking := lacking_instructions(half)):
            instead = without[config.precision]
            log.warning(
                "this machine has no instructions for %s (one of: %s): with precision=%s graphs are computed %s",
                half,
                ", ".join(lacking),
                config.precision,
                instead if instead == AS_WRITTEN else f"in {instead}",
            )
            return dataclasses.replace(config, precision=instead)
    return config


def _is_priced_whole(captured: CapturedGraph, config: Config) -> bool:
    """Whether whole calls of the graph can be timed, and are to be: not where nothing is timed, or all is compared with eager anyway."""
    if captured.kind != "inference" or captured.writes_inputs or is_running():
        return False
    if config.placement == "estimate" or config.verify == "always":
        return False
    graph = captured.graph_module.graph
    values = [value for node in graph.nodes for value in tree_leaves(node.meta.get("val"))]
    on_cpu = all(value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor))
    return on_cpu and is_repeatable(captured.graph_module)


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Explanation:
    """The plans of every graph that `model(*args, **kwargs)` compiles, in order.

    The model is compiled anew (earlier compilations of it stay valid) and called once, in the caller's grad mode; under grad mode
    only the forward graph is compiled by the call, as nothing calls backward. `options` and `dynamic` as for `torch.compile`: Dynamo
    makes sizes symbolic that it has seen vary, also in earlier compilations of the same code, unless `dynamic=False`. A model whose graphs
    hold collectives is explained by all ranks or by none: the call is a call. The result prints as text; `to_json()` and `to_html()` give
    the other forms, `write_kernels(folder)` the text of every kernel.

        with torch.no_grad():
            print(torch_hybrid_backend.explain(model, x))
    """
    config = Config.from_env(os.environ).with_options(options, None)
    plans: list[Plan] = []
    regions: list[Mapping[str, CompiledRegion]] = []
    # Dynamo recognises a compilation by its backend object: a new partial is a new compilation.
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append, on_regions=regions.append)
    torch.compile(model, backend=backend, dynamic=dynamic)(*args, **kwargs)
    why = left_in_float(model) if isinstance(model, torch.nn.Module) else {}
    return Explanation(tuple(with_reasons(plan, why) for plan in plans), tuple(regions))


def with_reasons(plan: Plan, why: Mapping[str, Refused]) -> Plan:
    """The plan with what a quantised model knows of its layers in floating point, by site."""
    if plan.conversion is None or not why:
        return plan

    def told(layer: Unconverted) -> Unconverted:
        # Where graph and model count a forward's layers differently: attention's projections have names of their own.
        known = why.get(layer.site, why.get(layer.site.partition("#")[0]))
        if known is None or layer.code is not Reason.EXCLUDED:
            return layer
        return dataclasses.replace(layer, code=known.code, why=known.why)

    left = tuple(map(told, plan.conversion.left))
    return dataclasses.replace(plan, conversion=dataclasses.replace(plan.conversion, left=left))
