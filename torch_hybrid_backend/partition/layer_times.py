"""Cost of each layer of a graph in a call, with the casts around it, and the least cost in float32.

    conv 80 us, relu fused      conv: 80         what is computed behind a layer is the layer's
    amax 20, quantise 10        next conv: 30    casts and quantisations are their reader's
    conv + conv 60              by their flops   kernels of several layers are shared out

Times are those of an engine's kernels in their places among the others (`CompiledRegion.operator_us`), so operands come from where they will
come from, and layouts are those of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.partition.flops import node_flops

aten = torch.ops.aten

Parts = Iterable[tuple[frozenset[str], float]]

# Multiply-adds of a direct convolution over those of Winograd's algorithm with tiles of 2x2. (Larger tiles save more of them; what they gain
# was less: docs/performance.md.)
_WINOGRAD_GAIN = 2.25
# A product of float32 by bfloat16 tiles of AMX takes at best that much less than one by float32's instructions (ADR 98).
_TILES_GAIN = 2.25
_PRODUCT_SIZE = 2048  # large enough for the processor's full rate, on a server's cores too


def layer_us(
    graph: torch.fx.Graph, layers: Collection[str], written: Collection[str], parts: Parts
) -> dict[str, float]:
    """Microseconds of each of the `layers` whose kernels are among the `parts`.

    `written`: names of the nodes that the graph has as written; the others are casts, quantisations and what finds their scales.
    """
    owners = _owners(graph, layers, written)
    flops = {node.name: node_flops(node) for node in graph.nodes if node.name in layers}
    spent: dict[str, float] = {}
    for names, us in parts:
        shared = sorted(names.intersection(layers)) or sorted({owners[name] for name in names if name in owners})
        total = sum(flops[name] for name in shared)
        for name in shared:
            share = flops[name] / total if total else 1 / len(shared)
            spent[name] = spent.get(name, 0.0) + share * us
    return spent


def _owners(graph: torch.fx.Graph, layers: Collection[str], written: Collection[str]) -> dict[str, str]:
    """For each node that has one, the layer that its time counts for: the last one before it, of a cast the first one behind."""
    nodes = list(graph.nodes)
    place = {node.name: position for position, node in enumerate(nodes)}

    def found(
        order: Sequence[Node], neighbours: Callable[[Node], Iterable[Node]], best: Callable[..., str]
    ) -> dict[str, str]:
        owner: dict[str, str] = {}
        for node in order:
            near = [owner[other.name] for other in neighbours(node) if other.name in owner]
            if node.name in layers:
                owner[node.name] = node.name
            elif near:
                owner[node.name] = best(near, key=place.__getitem__)
        return owner

    before = found(nodes, lambda node: node.all_input_nodes, max)
    behind = found(nodes[::-1], lambda node: node.users, min)
    return {**behind, **before, **{name: owner for name, owner in behind.items() if name not in written}}


def least_us(graph: torch.fx.Graph, flops_per_us: float, *, has_tiles: bool) -> float:
    """The least time of the graph's products in float32, whatever computes them, at the rate of a large product of float32's instructions.
    `has_tiles`: whether AMX may compute them."""
    gain = _TILES_GAIN if has_tiles else 1.0
    flops = sum(node_flops(node) / (_WINOGRAD_GAIN if _has_window(node) else 1.0) for node in graph.nodes)
    return flops / (flops_per_us * gain)


def _has_window(node: Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    weight: Any = node.args[1]
    return any(size != 1 for size in weight.meta["val"].shape[2:])


def float32_rate(microseconds: Callable[[Callable[[], object]], float]) -> float:
    """Floating-point operations per microsecond of a large product of float32 in PyTorch. `microseconds`: times a call."""
    a, b = (torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=torch.float32, device="cpu") for _ in range(2))
    result = torch.empty_like(a)
    with torch.no_grad():
        return 2 * _PRODUCT_SIZE**3 / microseconds(lambda: torch.mm(a, b, out=result))


def worth_mixing(own: Mapping[str, float], written: Mapping[str, float], least_gain: float) -> frozenset[str]:
    """The layers that take longer by `own` than by `written`: those of a graph in its precision that are to be as written. None where by these
    times that gains too little, beside the graph with all of its layers in either form."""
    both = own.keys() & written.keys()
    slow = frozenset(name for name in both if written[name] < (1 - least_gain) * own[name])
    mixed = sum(min(own[name], written[name]) for name in both)
    unmixed = min(sum(times[name] for name in both) for times in (own, written))
    return slow if mixed < (1 - least_gain) * unmixed else frozenset()
