"""Counts of the layers in reduced precision, converted by a pass or written so in the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.fx

from torch_hybrid_backend.core.plan import Conversion, Unconverted
from torch_hybrid_backend.core.precision import AS_WRITTEN, DEFAULT_TOLERANCES
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.graph.devices import device_of
from torch_hybrid_backend.graph.precision import computes, converted_to, is_cast, precision_of
from torch_hybrid_backend.graph.quantized import is_quantizing
from torch_hybrid_backend.graph.source import module_call, source_line
from torch_hybrid_backend.graph.values import has_mutation
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.precision.half import DTYPES
from torch_hybrid_backend.passes.precision.lists import is_layer, is_on

aten = torch.ops.aten

# ATen operators of the functions that `quantize` treats as layers.
_CALLED = (aten.convolution, aten.linear, aten.mm, aten.addmm, aten.bmm, aten.mv, aten.matmul)
_ATTENTION = (aten.scaled_dot_product_attention, aten._scaled_dot_product_flash_attention_for_cpu)
# Products that `quantize_layers` converts where one operand is a weight.
_QUANTIZED = (aten.convolution, aten.linear, aten.mm, aten.addmm)


def mark_sites(gm: torch.fx.GraphModule) -> None:
    """Set `meta["site"]` of the layers of a captured graph: their names as in `core.plan.Unconverted.site`."""
    count = Counter[str]()
    for node in gm.graph.nodes:
        if is_on(node, _CALLED):
            call = module_call(node)
            count[call] += 1
            path = call.partition("@")[0]
            node.meta["site"] = path if count[call] == 1 else f"{path}#{count[call]}"


def quantized_as_written(gm: torch.fx.GraphModule, ctx: PassContext) -> Conversion | None:
    """Counts for a graph whose model quantizes layers itself, with the layers that it does not quantize. None if it quantizes none."""
    if not any(is_quantizing(node.target) for node in gm.graph.nodes):
        return None
    left = {node.name: _not_quantized(node) for node in gm.graph.nodes if is_layer(node)}
    return conversion(gm, replace(ctx, as_written=left))


def _not_quantized(node: torch.fx.Node) -> Refused:
    if is_on(node, _CALLED):
        return Refused(Reason.EXCLUDED, "the model has it in floating point")
    return Refused(Reason.UNSUPPORTED, f"{node.target} is not quantized")


def conversion(gm: torch.fx.GraphModule, ctx: PassContext, tolerance: float | None = None) -> Conversion:
    """Counts for a graph after the passes that reduce its precision, and the reason for each layer that stays as written.

    tolerance: None for the precision's default.
    """
    constant = ctx.constant_nodes(gm)
    casts = [node for node in gm.graph.nodes if is_cast(node)]
    computing = [node for node in gm.graph.nodes if node not in constant and computes(node)]
    converted = Counter(name for name in map(converted_to, computing) if name is not None)
    reasons = {**_unreached(gm, ctx, computing), **gm.meta.get("as_written", {}), **ctx.as_written}
    left = tuple(
        Unconverted(
            node.name,
            str(node.target),
            reasons[node.name].code,
            reasons[node.name].why,
            source_line(node),
            node.meta.get("site", ""),
        )
        for node in computing
        if node.name in reasons and converted_to(node) is None
    )
    return Conversion(
        precision=ctx.precision,
        tolerance=DEFAULT_TOLERANCES.get(ctx.precision, 0.0) if tolerance is None else tolerance,
        operators=len(computing),
        converted=tuple(converted.most_common()),
        casts=sum(node not in constant for node in casts),
        weight_casts=sum(node in constant for node in casts),
        left=left,
    )


def _unreached(gm: torch.fx.GraphModule, ctx: PassContext, computing: Iterable[torch.fx.Node]) -> dict[str, Refused]:
    """Reasons why the passes for `ctx.precision` do not consider some layers, by the layer's name."""
    if ctx.precision == AS_WRITTEN:
        return {}
    half = str(DTYPES.get(ctx.precision, "")).removeprefix("torch.")
    layers = [node for node in computing if is_layer(node) and precision_of(node) != half]
    if has_mutation(gm):
        return {
            node.name: Refused(Reason.UNSUPPORTED, "the graph writes in place: nothing of it is converted")
            for node in layers
        }
    return {node.name: Refused(Reason.UNSUPPORTED, _why_unreached(node, ctx.precision)) for node in layers}


def _why_unreached(node: torch.fx.Node, precision: str) -> str:
    device = device_of(node)
    if device is None or device.type != "cpu":
        return "only layers on the CPU are converted"
    if precision in DTYPES:
        return f"it computes in {precision_of(node)}: float32 alone is converted"
    if precision.endswith("-weights"):
        return "only constant weights of linear layers and embeddings are kept in fewer bits"
    if is_on(node, _ATTENTION):
        return "attention is not quantized"
    if is_on(node, _QUANTIZED):
        return "its right operand is not a constant weight: products of activations are not quantized"
    return f"{node.target} is not quantized"
